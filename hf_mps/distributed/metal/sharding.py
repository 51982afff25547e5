"""What DeviceMesh, DTensor and FSDP2 ask of a device's module and of their own operators, on mps.

They were written for devices with streams. torch.mps has one queue, and before torch 2.15 no class Stream; the CPU,
which has no queue at all, answers with streams and events that do nothing (torch/cpu/__init__.py), and on one queue
that is right too: work that is encoded later runs later. FSDP2's three operators are Python functions that are
registered for each device but mps (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py).
"""

from __future__ import annotations

import sys
from typing import Any

import torch

COLLECTIVES = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
FUNCTIONS = {
    "all_gather_copy_in": "all_gather_copy_in_cuda",
    "split_with_sizes_copy": "split_with_sizes_copy",
    "chunk_cat": "chunk_cat",
}
"""FSDP2's operators, and the functions that do them on any device."""
OF_THE_CPU = frozenset(("Event", "StreamContext", "stream"))
_registered: list[Any] = []


class Stream(torch.cpu.Stream):
    """One of the CPU's, with the numbers that FSDP2 names a stream by since torch 2.15, and that nothing reads on mps.

    It hands them to `fsdp::record_grad_output_stream`, which only devices that free memory at once do anything for.
    """

    stream_id = device_index = device_type = 0


class Handle:
    """torch.mps with what else a mesh asks a device for; a name that torch.mps has is its own, but for Event."""

    Stream = Stream

    def current_stream(self, device: Any = None) -> Any:
        """Return the one queue."""
        return QUEUE

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu if name in OF_THE_CPU else torch.mps, name)

    def is_initialized(self) -> bool:
        """Return whether the device may be used: always."""
        return True

    def current_device(self) -> int:
        """Return the number of the one device."""
        return 0

    def set_device(self, device: Any) -> None:
        """Nothing: there is one device."""


QUEUE = Stream()
HANDLE = Handle()


def handle() -> Handle:
    """Return the module of mps as a mesh needs it; FSDP2's operators are there from then on, where it was imported."""
    collectives = sys.modules.get(COLLECTIVES)
    if collectives is not None and not _registered:
        _registered.append(torch.library.Library("fsdp", "IMPL"))  # type: ignore[no-untyped-call]
        for operator, function in FUNCTIONS.items():
            known = torch._C._dispatch_has_kernel_for_dispatch_key(f"fsdp::{operator}", "MPS")
            if not known and hasattr(collectives, function):
                _registered[0].impl(operator, getattr(collectives, function), "MPS")
    return HANDLE
