"""`hf-mps doctor --peers`: a link between two hosts is measured, and each way in which it fails names what to do."""

from __future__ import annotations

import errno
import json
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from hf_mps.cli.main import main
from hf_mps.core.errors import UserError
from hf_mps.distributed.link import interfaces, talk
from hf_mps.distributed.link.interfaces import Interface
from hf_mps.doctor import peers
from hf_mps.doctor.findings import Finding
from scripts.tools.hosts import hosts, refusal, stop

DOCTOR = [sys.executable, "-m", "hf_mps", "doctor"]
WIRE = Interface("en4", interfaces.ETHERNET, ("10.0.0.5",))
BRIDGE = Interface("bridge0", interfaces.THUNDERBOLT, ("169.254.1.1",))


@contextmanager
def answering() -> Iterator[str]:
    """A machine at loopback that answers one other; yields HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def one() -> None:
            connected, _ = listening.accept()
            with connected:
                talk.answer(connected, peers.facts())

        thread = threading.Thread(target=one)
        thread.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        thread.join(timeout=10)


@pytest.fixture(scope="module")
def met() -> peers.Peer:
    """A peer that is this machine, measured."""
    with answering() as place:
        found = peers.meet(place)
    assert isinstance(found, peers.Peer)
    return found


def said(found: list[Finding]) -> dict[str, str]:
    return {one.name: f"{one.state}: {one.says} > {one.next}" for one in found}


@pytest.mark.skipif(bool(refusal()), reason=f"no hosts: {refusal()}")
def test_two_hosts_measure_what_lies_between_them() -> None:
    with hosts(2, rate="400mbit", latency="3ms") as macs:
        server = macs[0].start([*DOCTOR, "--serve"], stdout=-1)
        assert server.stdout is not None
        assert "answers at port" in server.stdout.readline()
        asked = macs[1].run([*DOCTOR, "--peers", macs[0].name, "--json"])
        nothing = macs[0].run([*DOCTOR, "--peers", macs[1].name, "--json"])
        served = stop(server, signal.SIGINT)
    assert "10.77.0.2: mac-1 has measured" in served
    told = json.loads(asked.stdout)
    link = told["links"]["mac-0"]
    assert 0.006 <= link["least_round_trip"] <= link["round_trip"]
    assert 0 < link["there"] <= 400e6
    assert 0 < link["here"] <= 400e6
    assert abs(link["clock"]) <= link["least_round_trip"]  # the two share a clock
    assert link["back"] == ""
    names = {one["name"]: one["says"] for one in told["findings"]["mac-0"]}
    assert names["reached"] == "mac-0 over net0 (virtual)"
    assert asked.returncode == 0, asked.stderr
    assert nothing.returncode == 1
    assert "nothing answers at its port 29477" in nothing.stdout


def test_a_peer_with_the_same_versions_is_well(met: peers.Peer) -> None:
    told = said(list(peers._report(met)))
    assert told["versions"].startswith("ok: the same: torch ")
    assert told["way back"].startswith("ok")
    assert told["bandwidth"].endswith("ms") or "link.latency=" in told["bandwidth"]


def test_versions_that_differ_come_with_the_command_for_the_other_machine(met: peers.Peer) -> None:
    theirs = {**met.measured.facts["versions"], "torch": "2.8.0", "Python": "3.9.1"}
    other = replace(met, host="mac-1", measured=replace(met.measured, facts={**met.measured.facts, "versions": theirs}))
    told = said(list(peers._versions(other)))
    ours = met.measured.facts["versions"]["torch"]
    assert told["versions"] == (
        f"problem: torch {ours} here and 2.8.0 there > on mac-1: pip install 'torch=={ours.partition('+')[0]}'"
    )
    assert told["systems"].startswith("note: Python ")


def test_a_clock_that_is_off_and_a_closed_way_back_are_told(met: peers.Peer) -> None:
    off = replace(met, measured=replace(met.measured, clock=90.0, back="timed out"))
    told = said(list(peers._report(off)))
    assert told["clock"].startswith("note: 90000.0 ms ahead of this one's")
    assert told["way back"].startswith("problem: 127.0.0.1 cannot connect to this machine (timed out)")


def test_the_thunderbolt_bridge_is_named_where_both_have_one(met: peers.Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "every", lambda: [BRIDGE, WIRE])
    theirs = [{"name": "bridge0", "kind": interfaces.THUNDERBOLT, "addresses": ["169.254.9.9"]}]
    over_wire = replace(met, ours=WIRE, measured=replace(met.measured, facts={"interfaces": theirs}))
    told = said(list(peers._better(over_wire)))
    assert "hf-mps doctor --peers 169.254.9.9" in told["interface"]
    assert not list(peers._better(replace(over_wire, ours=BRIDGE)))


def test_gloo_is_told_the_interface_where_the_machines_name_leads_elsewhere(
    met: peers.Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interfaces, "of_host_name", lambda: ("mac-0", WIRE))
    over_bridge = replace(met, ours=BRIDGE)
    assert said(list(peers._gloo(over_bridge)))["gloo"].endswith("> export GLOO_SOCKET_IFNAME=bridge0")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "bridge0")
    assert not list(peers._gloo(over_bridge))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "en9")
    assert said(list(peers._gloo(over_bridge)))["gloo"].endswith("> unset GLOO_SOCKET_IFNAME")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(), "nothing answers at its port 29477 > on mac-1: hf-mps doctor --serve"),
        (TimeoutError(), "it sleeps, is off, or its firewall drops what comes"),
        (OSError(errno.EHOSTUNREACH, "no route"), "no way leads to mac-1"),
        (socket.gaierror(), "hf-mps doctor --peers mac-1.local"),
        (talk.NotAPeer("another program answers"), "another program answers"),
        (ConnectionResetError("gone"), "the link to mac-1 broke off: gone"),
    ],
)
def test_a_machine_that_is_not_reached_says_why(error: OSError, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(talk, "ask", refuse)
    found = peers.meet("mac-1")
    assert isinstance(found, Finding)
    assert found.state == "problem"
    assert words in f"{found.says} > {found.next}"


def test_another_program_at_the_port_is_no_peer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: listening.accept()[0].sendall(b"220 mail.example ready\r\n"))
        thread.start()
        found = peers.meet(f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join(timeout=10)
    assert isinstance(found, Finding)
    assert "another program" in found.says


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--peers"], "--peers names no machine; next: hf-mps doctor --peers HOST, with --serve running there"),
        (["mac-1"], "next, to measure the link to it: hf-mps doctor --peers mac-1"),
        (["--serve", "--peers", "mac-1"], "--serve answers, --peers asks"),
        (["--peers", "mac-1", "--trials"], "leave --trials and --torch out"),
        (["--peers", "mac-1:none"], "allowed: NAME, ADDRESS or NAME:PORT"),
    ],
)
def test_words_that_make_no_sense_are_refused(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == UserError.exit_code
    assert told in capsys.readouterr().err


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", peers.PORT)):
        assert main(["doctor", "--serve"]) == UserError.exit_code
    assert f"port {peers.PORT}: another program has it; next: lsof -i :{peers.PORT}" in capsys.readouterr().err
