"""What kernels report of their arguments: the buffer that they write errors to (c10/metal/error.h)."""

from __future__ import annotations

import ctypes
import threading

import torch

from hf_mps.metal.kernels.runtime import NoRule

OUTSIDE = "an index out of bounds: the simulated device raises what a Mac raises"

SIZE = 15364
"""Bytes of ErrorMessages: a count, and room for 30 messages."""

_local = threading.local()


class Errors:
    """The buffer of this OS thread, as a kernel's argument: `tensor`; `any()` says whether something was reported."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(SIZE, dtype=torch.uint8, device="cpu")
        self._count = self.tensor[:4].view(torch.int32).numpy()

    def any(self) -> bool:
        """A kernel reported an error since the last question."""
        reported = bool(self._count[0])
        self._count[0] = 0
        return reported


def errors() -> Errors:
    """The buffer, which begins empty."""
    found: Errors | None = getattr(_local, "errors", None)
    if found is None:
        found = _local.errors = Errors()
    return found


def refuse_outside(index: torch.Tensor, size: int) -> None:
    """Raises NoRule where an index is out of bounds, of which a kernel says nothing: it would write beside the tensor.

    A kernel on a Mac does just that. The device's memory is the host's here, and is read where it lies.
    """
    flat = index.contiguous()
    count = flat.numel()
    if not count:
        return
    kind = ctypes.c_int64 if flat.dtype == torch.int64 else ctypes.c_int32
    there = torch.frombuffer((kind * count).from_address(flat.data_ptr()), dtype=flat.dtype)
    if there.min() < -size or there.max() >= size:
        raise NoRule(OUTSIDE)
