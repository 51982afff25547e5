"""What kernels report of their arguments: the buffer that they write errors to (c10/metal/error.h)."""

from __future__ import annotations

import threading

import torch

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
