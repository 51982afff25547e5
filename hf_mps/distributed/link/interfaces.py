"""Network interfaces by what they are: the Thunderbolt bridge before Ethernet before Wi-Fi."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from hf_mps.device import machine

THUNDERBOLT, INFINIBAND, ETHERNET, WIFI = "Thunderbolt", "InfiniBand", "Ethernet", "Wi-Fi"
VIRTUAL, LOOPBACK = "virtual", "loopback"
FASTEST_FIRST = (THUNDERBOLT, INFINIBAND, ETHERNET, VIRTUAL, WIFI, LOOPBACK)
"""Kinds from the one to take for training to the last; a bridge of Thunderbolt cables carries 10 to 80 Gbit/s."""
SYSFS = Path("/sys/class/net")
# ARPHRD_INFINIBAND of linux/if_arp.h.
INFINIBAND_TYPE = "32"


@dataclass(frozen=True)
class Interface:
    """A network interface that is up; `mtu` is in bytes, `speed` in Mbit/s as its driver says, 0 where it does not."""

    name: str
    kind: str
    addresses: tuple[str, ...]
    speed: int = 0
    mtu: int = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.kind})"


def every() -> list[Interface]:
    """Return the interfaces that are up and have an address, the fastest kind first."""
    stats, ports = psutil.net_if_stats(), _hardware_ports()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        own = tuple(plain(one.address) for one in addresses if one.family in (socket.AF_INET, socket.AF_INET6))
        state = stats.get(name)
        if own and state is not None and state.isup:
            found.append(Interface(name, _kind(name, own, ports), own, state.speed, state.mtu))
    return sorted(found, key=lambda one: FASTEST_FIRST.index(one.kind))


def of_socket(connected: socket.socket) -> Interface | None:
    """Return the interface that a connected socket's packets leave by; None where the system tells none of its address.

    The kernel chose it when it connected, as `route get` and `ip route get` would say.
    """
    name = connected.getsockname()
    known = every()
    if len(name) == 4 and name[3]:  # an IPv6 address that is valid on one link alone
        scope = socket.if_indextoname(name[3])
        return next((one for one in known if one.name == scope), None)
    return next((one for one in known if plain(name[0]) in one.addresses), None)


def plain(address: str) -> str:
    """Return an address without its scope, and an IPv4 one as such where a socket for both families wrote it."""
    return address.partition("%")[0].removeprefix("::ffff:")


def of_host_name() -> tuple[str, Interface | None]:
    """Return this machine's name and the interface that it leads to, None where it leads to none.

    Gloo binds to it where GLOO_SOCKET_IFNAME names no interface (ProcessGroupGloo::createDefaultDevice), and to
    loopback, which no other machine reaches, where the name leads nowhere.
    """
    name = socket.gethostname()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return name, None
    address = plain(str(found[0][4][0]))
    return name, next((one for one in every() if address in one.addresses), None)


def _kind(name: str, addresses: tuple[str, ...], ports: Mapping[str, str]) -> str:
    if any(address.startswith("127.") or address == "::1" for address in addresses):
        return LOOPBACK
    if machine.real().mac:
        return _mac_kind(name, ports.get(name, ""))
    place = SYSFS / name
    if name.startswith("thunderbolt"):
        return THUNDERBOLT
    if (place / "wireless").exists() or (place / "phy80211").exists():
        return WIFI
    if (place / "type").is_file() and (place / "type").read_text().strip() == INFINIBAND_TYPE:
        return INFINIBAND
    return ETHERNET if (place / "device").exists() else VIRTUAL


def _mac_kind(name: str, port: str) -> str:
    """Return the kind of a Mac's interface by the hardware port that macOS names; bridge0 is Thunderbolt's."""
    if ("Thunderbolt" in port and "Ethernet" not in port) or (not port and name == "bridge0"):
        return THUNDERBOLT
    if "Wi-Fi" in port or "AirPort" in port:
        return WIFI
    return ETHERNET if port else VIRTUAL


@cache
def _hardware_ports() -> dict[str, str]:
    """Return macOS's names of hardware ports by interface (`networksetup -listallhardwareports`); none elsewhere."""
    if not machine.real().mac:
        return {}
    try:
        words = ["networksetup", "-listallhardwareports"]
        asked = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return hardware_ports(asked.stdout)


def hardware_ports(listed: str) -> dict[str, str]:
    """Return {interface: hardware port} of what `networksetup -listallhardwareports` prints."""
    return {device: port for port, device in re.findall(r"Hardware Port: (.+)\nDevice: (\S+)", listed)}
