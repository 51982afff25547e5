"""`hf-mps doctor --peers HOST…` and `--serve`: the links to the other machines of a run, measured. Imports no torch."""

from __future__ import annotations

import errno
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from hf_mps.core import status
from hf_mps.core.errors import UserError
from hf_mps.device import machine
from hf_mps.distributed.link import interfaces, talk
from hf_mps.distributed.link.interfaces import Interface
from hf_mps.distributed.link.talk import PORT, Measured
from hf_mps.doctor import findings
from hf_mps.doctor.findings import Finding, note, ok, problem

# What every machine of a run must have alike: pickled objects and checkpoints pass between them.
SAME = ("torch", "transformers", "accelerate", "hf_mps")
SERVE = "hf-mps doctor --serve"
VARIABLE = "GLOO_SOCKET_IFNAME"
# From here on files and logs of two machines no longer sort by time.
CLOCK_SECONDS = 1.0
# A round trip above this costs more than the gradients of a small model on Gigabit Ethernet.
SLOW_TRIP = 5e-3
FIREWALL = "System Settings > Network > Firewall > Options lets python in (a Mac); sudo ufw allow from"
LOCAL_NETWORK = "System Settings > Privacy & Security > Local Network, and allow the terminal there"


@dataclass(frozen=True)
class Peer:
    """Another machine as it was found: how the link is measured, and the interfaces at its two ends."""

    host: str
    measured: Measured
    ours: Interface | None
    theirs: Mapping[str, Any] | None


def serve() -> None:
    """Answer the machines that run `--peers` until Ctrl-C. Raises UserError where the port is taken."""
    name = socket.gethostname()
    print(f"{name} answers at port {PORT} until Ctrl-C; on another machine: hf-mps doctor --peers {name}", flush=True)
    try:
        talk.serve(facts(), _tell)
    except KeyboardInterrupt:
        print()
    except OSError as error:
        words = "another program has it" if error.errno == errno.EADDRINUSE else str(error)
        raise UserError(f"port {PORT}: {words}; next: lsof -i :{PORT}") from error


def _tell(address: str, came: Mapping[str, Any] | OSError) -> None:
    what = f"broke off: {came}" if isinstance(came, OSError) else f"{came.get('name', 'a machine')} has measured"
    print(f"{interfaces.plain(address)}: {what}", flush=True)


def run(hosts: Sequence[str], *, json: bool = False) -> None:
    """Measure the link to each of `hosts` (NAME, ADDRESS, or NAME:PORT) and print what was found.

    Raises RunError (exit 1), which counts the problems, where there is one.
    """
    sections: dict[str, list[Finding]] = {"this machine": list(_here())}
    values: dict[str, Any] = {}
    for host in hosts:
        with status.shown(f"measuring the link to {host} …"):
            found = meet(host)
        if isinstance(found, Finding):
            sections[host] = [found]
        else:
            sections[host] = list(_report(found))
            values[host] = asdict(found.measured)
    findings.show(sections, {"links": values}, json=json)
    findings.stop_at_problems(sections)


def facts() -> dict[str, Any]:
    """What a machine tells its peers: its name, versions, system and interfaces."""
    here = machine.real()
    versions = {name: _version(name) for name in SAME}
    versions |= {"Python": platform.python_version()}
    if here.macos:
        versions["macOS"] = here.macos
    return {
        "name": socket.gethostname(),
        "versions": versions,
        "interfaces": [asdict(one) for one in interfaces.every()],
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def meet(host: str) -> Peer | Finding:
    """Measure the link to one host, or return why that is not possible, with what to do."""
    name, port = _place(host)
    try:
        measured, connected = talk.ask(name, facts(), port)
    except (OSError, ValueError) as error:
        return _unreached(name, port, error)
    with connected:
        ours = interfaces.of_socket(connected)
        address = interfaces.plain(connected.getpeername()[0])
    theirs = next((one for one in measured.facts.get("interfaces", ()) if address in one["addresses"]), None)
    return Peer(name, measured, ours, theirs)


def _place(host: str) -> tuple[str, int]:
    """Return name and port of NAME, NAME:PORT or an IPv6 address. Raises UserError for a port that is no number."""
    name, colon, port = host.rpartition(":")
    if not colon or ":" in name:
        return host, PORT
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--peers has '{host}'; allowed: NAME, ADDRESS or NAME:PORT, with a port of 1 to 65535")
    return name, int(port)


def _unreached(host: str, port: int, error: Exception) -> Finding:
    """Say why there is no link, by what the system answered."""
    there = f"on {host}: {SERVE}"
    if isinstance(error, socket.gaierror):
        says = f"no machine of the name {host} is known here"
        return problem("reached", says, f"hf-mps doctor --peers {host.partition('.')[0]}.local, or its address")
    if isinstance(error, talk.NotAPeer):
        return problem("reached", f"port {port} of {host}: {error}", f"{there}, in the same version of hf_mps")
    if isinstance(error, ConnectionRefusedError):
        return problem("reached", f"{host} is there, and nothing answers at its port {port}", there)
    if isinstance(error, TimeoutError):
        says = f"{host} does not answer within {talk.PATIENCE:g} s: it sleeps, is off, or its firewall drops what comes"
        return problem("reached", says, f"wake it; {there}; where that runs: {FIREWALL} this machine (Linux)")
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        on_a_mac = f", or macOS keeps programs off the local network; next: {LOCAL_NETWORK}"
        more = on_a_mac if machine.real().mac else ""
        return problem("reached", f"no way leads to {host}{more}", f"{_route(host)} says which interface is taken")
    return problem("reached", f"the link to {host} broke off: {error}", there)


def _route(host: str) -> str:
    return f"route -n get {host}" if machine.real().mac else f"ip route get {host}"


def _here() -> Iterator[Finding]:
    """The interfaces of this machine, the fastest kind first, and the one that Gloo would take."""
    known = [one for one in interfaces.every() if one.kind != interfaces.LOOPBACK]
    if not known:
        yield problem("interfaces", "none is up and has an address", "a cable, or Wi-Fi")
        return
    yield ok("interfaces", ", ".join(f"{one} {one.addresses[0]}" for one in known))


def _report(peer: Peer) -> Iterator[Finding]:
    """Everything about a machine that answered."""
    seen, host = peer.measured, peer.host
    over = f"over {peer.ours}" if peer.ours is not None else ""
    yield ok("reached", f"{seen.facts.get('name', host)} {over}".rstrip())
    yield from _better(peer)
    yield from _gloo(peer)
    says = f"{1e3 * seen.round_trip:.2f} ms, {1e3 * seen.least_round_trip:.2f} at best"
    if seen.round_trip > SLOW_TRIP:
        yield note("round trip", f"{says}: each bucket of gradients waits for it", "a cable instead of Wi-Fi")
    else:
        yield ok("round trip", says)
    least = min(seen.there, seen.here)
    keys = f"link.bandwidth={least / 1e9:.3g} link.latency={500 * seen.round_trip:.3g}"
    says = f"{seen.there / 1e9:.2f} Gbit/s there, {seen.here / 1e9:.2f} Gbit/s back"
    yield note("bandwidth", says, f"what a step costs on it: hf-mps finetune RECIPE --plan {keys}")
    yield _clock(seen)
    yield from _versions(peer)
    if seen.back:
        says = f"{host} cannot connect to this machine ({seen.back}); training needs connections both ways"
        yield problem("way back", says, f"here: {FIREWALL} {host} (Linux)")
    else:
        yield ok("way back", f"{host} can connect to this machine")


def _better(peer: Peer) -> Iterator[Finding]:
    """A Thunderbolt bridge that both have and the link does not use."""
    if peer.ours is None or peer.ours.kind == interfaces.THUNDERBOLT:
        return
    bridge = next((one for one in interfaces.every() if one.kind == interfaces.THUNDERBOLT), None)
    remote = peer.measured.facts.get("interfaces", ())
    theirs = next((one for one in remote if one["kind"] == interfaces.THUNDERBOLT), None)
    if bridge is not None and theirs is not None:
        says = f"both machines have a Thunderbolt bridge, and the name {peer.host} leads over {peer.ours}"
        yield problem("interface", says, f"hf-mps doctor --peers {theirs['addresses'][0]}, and train by that address")


def _gloo(peer: Peer) -> Iterator[Finding]:
    """Whether Gloo, left alone, binds to the interface that leads to the peer."""
    if peer.ours is None or os.environ.get(VARIABLE) == peer.ours.name:
        return
    if said := os.environ.get(VARIABLE):
        yield problem("gloo", f"{VARIABLE}={said}, and {peer.ours} leads to {peer.host}", f"unset {VARIABLE}")
        return
    name, bound = interfaces.of_host_name()
    if bound is None or bound.name != peer.ours.name:
        where = str(bound) if bound is not None else "no interface"
        says = f"this machine's name, {name}, leads to {where}, and Gloo would bind there, not to {peer.ours}"
        yield problem("gloo", says, f"export {VARIABLE}={peer.ours.name}")


def _clock(seen: Measured) -> Finding:
    """The other clock's lead, and what sets it where it is far off."""
    error = seen.least_round_trip / 2
    sign = "ahead" if seen.clock > 0 else "behind"
    says = f"{abs(seen.clock) * 1e3:.1f} ms {sign} of this one's, give or take {error * 1e3:.2f} ms"
    if abs(seen.clock) < CLOCK_SECONDS:
        return ok("clock", says)
    command = (
        "sudo sntp -sS time.apple.com" if "macOS" in seen.facts.get("versions", {}) else "timedatectl set-ntp true"
    )
    return note("clock", f"{says}: files and logs of the two do not sort by time", f"there: {command}")


def _versions(peer: Peer) -> Iterator[Finding]:
    """Which versions differ; those of SAME must not."""
    ours, theirs = facts()["versions"], peer.measured.facts.get("versions", {})
    differ = {
        name: (ours.get(name), theirs.get(name)) for name in (*ours, *theirs) if ours.get(name) != theirs.get(name)
    }
    wrong = [name for name in SAME if name in differ]
    if wrong:
        says = ", ".join(f"{name} {differ[name][0]} here and {differ[name][1]} there" for name in wrong)
        pins = " ".join(f"'{name.replace('_', '-')}=={ours[name].partition('+')[0]}'" for name in wrong)
        yield problem("versions", says, f"on {peer.host}: pip install {pins}")
    rest = {name: pair for name, pair in differ.items() if name not in SAME}
    if rest:
        says = ", ".join(
            f"{name} {here or 'none'} here and {there or 'none'} there" for name, (here, there) in rest.items()
        )
        yield note("systems", says, "nothing, unless results are to agree to the last digit")
    if not differ:
        yield ok("versions", "the same: " + ", ".join(f"{name} {version}" for name, version in ours.items()))
