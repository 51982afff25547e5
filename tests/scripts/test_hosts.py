"""Hosts on this machine: each its name, address and processes; unplugged, ended, and none of it left behind."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from scripts.tools import hosts

pytestmark = pytest.mark.skipif(bool(hosts.refusal()), reason=f"no hosts: {hosts.refusal()}")
KNOCK = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=3); print('there')"
OPEN = "import socket; s = socket.create_server(('', 5000)); print('open', flush=True); [s.accept() for _ in range(2)]"


def test_hosts_know_each_other_and_leave_nothing_behind() -> None:
    before = set(psutil.pids())
    with hosts.hosts(3, rate="1gbit", latency="1ms") as macs:
        assert [mac.run(["hostname"]).stdout.strip() for mac in macs] == ["mac-0", "mac-1", "mac-2"]
        assert macs[2].run(["pwd"]).stdout.strip() == str(Path.cwd())
        server = macs[1].start(["python3", "-c", OPEN], stdout=-1)
        assert server.stdout.readline() == "open\n"
        knocked = [macs[index].run(["python3", "-c", KNOCK, "mac-1"]) for index in (0, 2)]
        assert [one.stdout for one in knocked] == ["there\n"] * 2, knocked
        macs[2].unplug()
        assert macs[2].run(["python3", "-c", KNOCK, "mac-1"]).returncode != 0
        left = macs[0].start(["sleep", "600"])
        macs[0].end()
        assert left.wait(timeout=10) != 0
        hosts.stop(server)
    hosts_of_this = [pid for pid in set(psutil.pids()) - before if os.getpid() in _ancestors(pid)]
    assert hosts_of_this == []


def _ancestors(pid: int) -> list[int]:
    try:
        return [one.pid for one in psutil.Process(pid).parents()]
    except psutil.NoSuchProcess:
        return []


def test_times_are_read_with_their_unit() -> None:
    assert [hosts.seconds(words) for words in ("0.3ms", "50us", "1s")] == pytest.approx([0.0003, 50e-6, 1.0])
    with pytest.raises(ValueError, match="'3' is no time"):
        hosts.seconds("3")


def test_who_may_not_make_them_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 501)
    assert hosts.refusal() == "only root makes network namespaces; next: sudo"
    with pytest.raises(OSError, match="only root"), hosts.hosts(2):
        pass
