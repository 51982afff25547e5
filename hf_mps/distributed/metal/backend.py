"""The backend's name, its choice before others, and the Gloo behind it."""

from __future__ import annotations

import atexit
import os
import socket
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch

from hf_mps.core.choice import Choice

NAME = "metal"
DEVICES = ("mps", "cpu")
GLOOS = ("gloo", "")
"""Backends that PyTorch names for mps and that take no tensors of it (pytorch#160732)."""
_kept: list[Any] = []


def choice(asked: str) -> Choice[str]:
    """Return the backend for a process group that was asked for as `asked`, and why.

    A default, which PyTorch calls "undefined", becomes `metal` where the accelerator is mps and PyTorch has no backend
    of its own for it, and PyTorch's own where it has. What a script names stays. Imports torch.
    """
    if str(asked) != torch.distributed.Backend.UNDEFINED:
        return Choice(str(asked), "the script asks for it")
    if torch._C._get_accelerator().type != "mps":
        return Choice(str(asked), "the accelerator is not mps")
    own = pytorchs()
    return own if own.value else Choice(NAME, own.reason)


def pytorchs() -> Choice[str]:
    """Return the backend that PyTorch, or another package, offers for mps, or "" with the reason. Imports torch."""
    from hf_mps.distributed.metal import operators

    if operators.pytorch_has_them():
        default = torch.distributed.Backend.default_device_backend_map.get("mps", "")
        able = [name for name, devices in torch.distributed.Backend.backend_capability.items() if "mps" in devices]
        if named := [name for name in (default, *able) if name not in (*GLOOS, NAME)]:
            return Choice(named[0], f"PyTorch {torch.__version__} runs collectives on mps by itself, by {named[0]}")
    return Choice(
        "",
        f"PyTorch {torch.__version__} has no backend for mps (pytorch#160732): Gloo gets the CPU's view of its memory",
    )


def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return what does the work of a `metal` group: Gloo, on the interface by which this host reaches the main process.

    GLOO_SOCKET_IFNAME names another one. PyTorch's own way takes the address of this host's name, which on a Mac may be
    the loopback's or Wi-Fi's while a Thunderbolt bridge is there (ProcessGroupGloo.cpp, createDefaultDevice).
    """
    gloo: Any = torch.distributed.ProcessGroupGloo
    address = "" if os.environ.get("GLOO_SOCKET_IFNAME") else own_address(os.environ.get("MASTER_ADDR", ""))
    if not address:
        return gloo(store, rank, size, timeout=timeout)
    options = gloo._Options()
    # Gloo's options have no public names for these two.
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(store, rank, size, options)


def own_address(main: str) -> str:
    """The address of this host by which it reaches the host `main`, or "" where that is not known; sends nothing."""
    if not main:
        return ""
    with suppress(OSError):
        # Any port does, as no packet leaves; 9 is that of the discard service (RFC 863).
        family, kind, protocol, _, place = socket.getaddrinfo(main, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)  # of a datagram socket: chooses the route
            return str(probe.getsockname()[0])
    return ""


def join_cpu(group: Any) -> None:
    """Let a group that was made for mps alone ("mps:metal") take CPU tensors too: it is Gloo that works for both."""
    if not isinstance(group, torch.distributed.ProcessGroup):  # what a rank gets that is not in the group
        return
    if {device.type for device in group._device_types} == {"mps"}:
        own = group._get_backend(torch.device("mps"))
        # CUSTOM, as PyTorch has every backend that a package registers (distributed_c10d.py, register_backend).
        group._register_backend(torch.device("cpu"), torch.distributed.ProcessGroup.BackendType.CUSTOM, own)


def keep(group: Any) -> None:
    """Keep the Gloo of a group that was made until the next world begins, or Python ends.

    The last to let go of it may be DDP's reducer, as a model is freed: Gloo's destructor then waits for its own threads
    with Python's lock held, and a thread that lets go of what its last work's future held needs that lock
    (ProcessGroupGloo.cpp; pybind_utils.h, PythonFunctionGuard), so that both wait for ever. Where Python is the last,
    PyTorch gives the lock away.
    """
    if not _kept:
        atexit.register(_kept.clear)  # while a thread can still have the lock
    if isinstance(group, torch.distributed.ProcessGroup):
        with suppress(RuntimeError):  # a group without the CPU
            _kept.append(group._get_backend(torch.device("cpu")))


def forget() -> None:
    """Let go of what `keep` kept of an earlier world."""
    if not torch.distributed.is_initialized():
        _kept.clear()
        atexit.unregister(_kept.clear)
