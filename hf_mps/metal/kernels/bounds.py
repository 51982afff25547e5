"""What a checked kernel may touch, and what it touched beyond that: the host's side of lowering/checks.py."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from hf_mps.metal.kernels.lowering.checks import FAULT, NOTE_BYTES, NOTE_WORDS, RANGES
from hf_mps.metal.kernels.lowering.parameters import LOCATIONS
from hf_mps.metal.kernels.values import Pointers, span

if TYPE_CHECKING:
    from torch import Tensor

    from hf_mps.metal.kernels.runtime import Kernel
    from hf_mps.metal.kernels.signature import Binding

WORD = 4
"""Bytes."""


class OutOfBounds(RuntimeError):
    """A kernel touched memory outside the buffers that were bound: the line names kernel, thread and buffer."""


class Watch:
    """The ranges of one launch's buffers in memory, and the note of accesses outside them.

    A tensor's range reaches from its first element to its last, gaps of its strides included; a tensor that is part of
    a larger storage is bounded to itself, as no binding of Metal is.
    """

    def __init__(self, buffers: Any, bound: list[tuple[Binding, Any]]) -> None:
        self.ranges = [each for binding, value in bound for each in _ranges(binding, value, buffers)]
        words = [len(self.ranges), *(word for each in self.ranges for word in each)]
        self._table = (ctypes.c_int64 * len(words))(*words)
        self._note = ctypes.create_string_buffer(NOTE_BYTES)
        buffers[RANGES], buffers[FAULT] = ctypes.addressof(self._table), ctypes.addressof(self._note)

    def report(self, kernel: Kernel, grid: tuple[int, ...]) -> None:
        """Raise OutOfBounds, with the first access, where the launch touched what was not bound."""
        count, group, thread, address, size, mask = (ctypes.c_int64 * NOTE_WORDS).from_buffer(self._note)
        if not count:
            return
        where = ", ".join(map(str, _position(grid, group, thread)))
        buffers = [
            each for each in kernel.signature.bindings if each.location < LOCATIONS and mask >> each.location & 1
        ]
        names = " or ".join(each.name for each in buffers[:3]) if len(buffers) <= 3 else "an argument buffer"
        raise OutOfBounds(
            f"{kernel.name} of {kernel.release}: the thread ({where}) of the grid touches {size} bytes "
            f"{self._place(address, mask)} of {names}; {count:,} accesses of this launch are out of bounds"
        )

    def _place(self, address: int, mask: int) -> str:
        meant = [each for each in self.ranges if mask >> each[2] & 1]
        if not meant:
            return "where nothing is bound instead"
        start, end, _ = min(meant, key=lambda each: min(abs(address - each[0]), abs(address - each[1])))
        if address < start:
            return f"{start - address:,} bytes before the start"
        return f"{address - start:,} bytes after the start of the {end - start:,} bytes"


def _ranges(binding: Binding, value: Any, buffers: Any) -> list[tuple[int, int, int]]:
    place = binding.location
    if value is None:
        return []
    if isinstance(value, bytes | Pointers):
        start = buffers[place]
        own = (start, start + len(value if isinstance(value, bytes) else value.data), place)
        return [own, *(_extent(each, place) for each in getattr(value, "tensors", ()))]
    return [_extent(value, place)]


def _extent(tensor: Tensor, place: int) -> tuple[int, int, int]:
    start = tensor.data_ptr()
    end = start + (span(tensor) * tensor.element_size() if tensor.numel() else 0)
    if tensor.element_size() < WORD:
        # Metal's atomics have 32 bits: the kernels change a half or a bool within its word, which no buffer ends in.
        start, end = start // WORD * WORD, -(-end // WORD) * WORD
    return start, end, place


def _position(grid: tuple[int, ...], group: int, thread: int) -> tuple[int, int, int]:
    """Return the thread's position in the grid: x, y, z."""
    threads, full, groups = grid[:3], grid[3:6], grid[6:]
    at = (group % groups[0], group // groups[0] % groups[1], group // (groups[0] * groups[1]))
    size = [min(whole - each * most, most) for whole, each, most in zip(threads, at, full, strict=True)]
    inside = (thread % size[0], thread // size[0] % size[1], thread // (size[0] * size[1]))
    x, y, z = (each * most + one for each, most, one in zip(at, full, inside, strict=True))
    return x, y, z
