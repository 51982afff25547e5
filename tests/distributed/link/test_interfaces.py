"""Interfaces: the one that a connection takes, their kinds, and Thunderbolt before Wi-Fi."""

from __future__ import annotations

import socket
from types import SimpleNamespace

import psutil
import pytest

from hf_mps.device import machine
from hf_mps.distributed.link import interfaces

LISTED = """
Hardware Port: Ethernet Adapter (en4)
Device: en4
Ethernet Address: 00:00:00:00:00:01

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 00:00:00:00:00:02

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 00:00:00:00:00:03
"""


def test_a_connection_is_named_by_its_interface() -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_connection(here.getsockname()) as there:
        found = interfaces.of_socket(there)
    assert found is not None
    assert (found.kind, "127.0.0.1" in found.addresses) == (interfaces.LOOPBACK, True)


def test_addresses_are_compared_without_scope_and_family() -> None:
    assert interfaces.plain("fe80::1%en0") == "fe80::1"
    assert interfaces.plain("::ffff:10.0.0.2") == "10.0.0.2"


def test_a_mac_names_its_ports_and_the_bridge_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = {"en0": "192.168.1.5", "en4": "10.0.0.5", "bridge0": "169.254.1.1", "utun3": "100.64.0.1"}
    both = {
        name: [SimpleNamespace(family=socket.AF_INET, address=address)] for name, address in addresses.items()
    }  # as psutil has them
    up = dict.fromkeys(addresses, SimpleNamespace(isup=True, speed=0, mtu=1500))
    mac = machine.Machine("Darwin", "arm64", "Apple M2", 0, "15.6")
    monkeypatch.setattr(machine, "real", lambda: mac)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: both)
    monkeypatch.setattr(psutil, "net_if_stats", lambda: up)
    monkeypatch.setattr(interfaces, "_hardware_ports", lambda: interfaces.hardware_ports(LISTED))
    assert [str(one) for one in interfaces.every()] == [
        "bridge0 (Thunderbolt)",
        "en4 (Ethernet)",
        "utun3 (virtual)",
        "en0 (Wi-Fi)",
    ]


def test_an_interface_that_is_down_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {name: SimpleNamespace(isup=False, speed=0, mtu=0) for name in psutil.net_if_stats()}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    assert interfaces.every() == []
