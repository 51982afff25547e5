"""Several hosts on this one: a network, process and host name each, joined by links of a given rate and latency.

    python scripts/tools/hosts.py --hosts 2 --rate 1gbit --latency 0.3ms -- ping -c 3 mac-1

runs a command on each host, named mac-0, mac-1, …, in this folder, and ends with the first exit code that is not 0.
`{index}` and `{name}` in the command are the host's own. In tests and benches:

    with hosts(2, rate="1gbit", latency="0.3ms") as macs:
        macs[0].run(["ping", "-c", "3", macs[1].name])

A host is a set of Linux namespaces (network, process ids, mounts for /proc and /etc/hosts, host name); the files are
this machine's. A veth pair leads from each to a hub; `tc`'s token bucket limits what the host sends to `rate`, and
scripts/tools/wire.py carries it on after `latency`. Everything ends with this process, even where that is killed: a
host's first process dies with it, all others with that one, and the links with their namespace. Needs root and Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WIRE = Path(__file__).with_name("wire.py")
NEEDED = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
BURST = "192kb"
"""What the token bucket lets pass at once: more than TCP's largest piece, which it would cut up otherwise."""
PR_SET_PDEATHSIG = 1
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Host:
    """One of the hosts; `pid` is its first process, as this machine numbers it."""

    index: int
    name: str
    address: str
    pid: int

    def entering(self, command: Sequence[str]) -> list[str]:
        """Return the words that run `command` on this host."""
        kinds = ("--net", "--uts", "--mount", "--pid")
        return ["nsenter", f"--target={self.pid}", *kinds, f"--wd={Path.cwd()}", *command]

    def start(self, command: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        """Start a command on this host, in a process group of its own; `settings` are Popen's."""
        return subprocess.Popen(self.entering(command), text=True, start_new_session=True, **settings)

    def run(self, command: Sequence[str], *, timeout: float = 60, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end, with what it prints."""
        return subprocess.run(
            self.entering(command), text=True, capture_output=True, timeout=timeout, check=False, **settings
        )

    def enter(self) -> None:
        """Let this process go to the host, with its network and its name; files and processes stay this machine's."""
        setns = ctypes.CDLL(None, use_errno=True).setns
        for kind in ("net", "uts"):
            with Path(f"/proc/{self.pid}/ns/{kind}").open() as namespace:
                if setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), f"setns to the {kind} of {self.name}")

    def unplug(self) -> None:
        """Take the host off the network without a word to the others, as a Mac that goes to sleep does."""
        _run(self.entering(["ip", "link", "set", "net0", "down"]))

    def end(self) -> None:
        """Kill every process of the host at once, as a loss of power does."""
        os.kill(self.pid, signal.SIGKILL)


def stop(started: subprocess.Popen[str], sign: signal.Signals = signal.SIGKILL) -> str:
    """End what `Host.start` started, by the signal `sign` to all of its process group; return what it printed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(started.pid, sign)
    return started.communicate(timeout=30)[0] or ""


def refusal() -> str:
    """Return in one line why this machine cannot make hosts, empty where it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if missing := [tool for tool in NEEDED if shutil.which(tool) is None]:
        return f"no {', '.join(missing)} here; next: apt install iproute2 util-linux hostname"
    if os.geteuid() != 0:
        return "only root makes network namespaces; next: sudo"
    link = "ip link add try0 type veth peer name try1"
    bucket = f"tc qdisc add dev try0 root tbf rate 1gbit burst {BURST} latency 50ms"
    words = ["unshare", "--net", "sh", "-c", f"{link} && {bucket}"]
    tried = subprocess.run(words, text=True, capture_output=True, check=False)
    return f"the kernel refuses: {tried.stderr.strip().splitlines()[0]}" if tried.returncode else ""


@contextlib.contextmanager
def hosts(count: int, *, rate: str = "10gbit", latency: str = "0ms") -> Iterator[list[Host]]:
    """Yield `count` hosts, 10.77.0.1 and on, each on a link of `rate` (tc's words) and `latency` in one direction.

    Raises OSError with `refusal` where this machine cannot make them.
    """
    if why := refusal():
        raise OSError(why)
    with contextlib.ExitStack() as ends, tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        names = [f"mac-{index}" for index in range(count)]
        addresses = [f"10.77.0.{index + 1}" for index in range(count)]
        table = Path(folder) / "hosts"
        known = zip(addresses, names, strict=True)
        table.write_text("127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in known))
        hub = ends.enter_context(_namespaces("hub", table))
        pids = [ends.enter_context(_namespaces(name, table)) for name in names]
        made = [Host(*of) for of in zip(range(count), names, addresses, pids, strict=True)]
        for host in made:
            _join(host, hub, rate)
        ends.enter_context(_wire(hub, count, seconds(latency)))
        yield made


def seconds(words: str) -> float:
    """Return a time such as `0.3ms`, `50us` or `1s` in seconds. Raises ValueError for other words."""
    found = re.fullmatch(r"([\d.]+)(us|ms|s)", words)
    if found is None:
        raise ValueError(f"'{words}' is no time; allowed: 0.3ms, 50us, 1s")
    return float(found[1]) * UNITS[found[2]]


@contextlib.contextmanager
def _namespaces(name: str, table: Path) -> Iterator[int]:
    """Yield the first process of new namespaces, in which `name` is the host's name and `table` its /etc/hosts."""
    # No server answers for other names: an empty list of them is refused at once, where a real one is waited for.
    names = f"hostname {name} && mount --bind {table} /etc/hosts && mount --bind /dev/null /etc/resolv.conf"
    inside = f"{names} && ip link set lo up && echo ready"
    flags = ["--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = ["unshare", *flags, "sh", "-c", f"{inside} && exec sleep infinity"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, preexec_fn=_die_with_parent) as outer:
        try:
            assert outer.stdout is not None
            if outer.stdout.readline() != "ready\n":
                raise OSError(f"no namespaces for {name}: {' '.join(words)} failed")
            yield int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
        finally:
            outer.kill()  # --kill-child: its child, first process of the host, goes with it, and all others with that


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _join(host: Host, hub: int, rate: str) -> None:
    """Lead a veth pair from the hub into the host, with an address, and limit what the host sends."""
    port = f"port{host.index}"
    in_hub = ["nsenter", f"--target={hub}", "--net"]
    _run([*in_hub, "ip", "link", "add", port, "type", "veth", "peer", "name", "net0", "netns", str(host.pid)])
    _run([*in_hub, "ip", "link", "set", port, "up"])
    _run(host.entering(["ip", "address", "add", f"{host.address}/24", "dev", "net0"]))
    _run(host.entering(["ip", "link", "set", "net0", "up"]))
    bucket = ["rate", rate, "burst", BURST, "latency", "50ms"]
    _run(host.entering(["tc", "qdisc", "add", "dev", "net0", "root", "tbf", *bucket]))


@contextlib.contextmanager
def _wire(hub: int, count: int, latency: float) -> Iterator[None]:
    ports = [f"port{index}" for index in range(count)]
    words = ["nsenter", f"--target={hub}", "--net", sys.executable, str(WIRE), "--latency", str(latency), *ports]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as wire:
        assert wire.stdin is not None
        assert wire.stdout is not None
        if wire.stdout.readline() != "ready\n":
            raise OSError("the wire between the hosts did not start")
        try:
            yield
        finally:
            wire.stdin.close()


def _run(words: Sequence[str]) -> None:
    """Run a command of the system. Raises OSError with what it says where it fails."""
    done = subprocess.run(words, text=True, capture_output=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


def _own(word: str, host: Host) -> str:
    return word.replace("{index}", str(host.index)).replace("{name}", host.name)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="10gbit", help="what a host sends at most, in tc's words")
    parser.add_argument("--latency", default="0ms", help="in one direction")
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="behind --, with {index} and {name}")
    words = parser.parse_args()
    with hosts(words.hosts, rate=words.rate, latency=words.latency) as made:
        started = [host.start([_own(word, host) for word in words.command]) for host in made]
        return next((code for code in [one.wait() for one in started] if code), 0)


if __name__ == "__main__":
    sys.exit(main())
