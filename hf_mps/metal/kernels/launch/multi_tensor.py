"""Lists of tensors in few launches: argument buffers of 32 tensors, and a table of which threadgroup does what.

A threadgroup does a chunk of 65,536 elements of one tensor; a launch has at most 32 of them (MultiTensorApply.h).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hf_mps.metal.kernels.values import Pointers

CHUNK, GROUPS, TENSORS = 65536, 32, 32
_TABLE = struct.Struct(f"<{TENSORS + 2 * GROUPS}Q")


@dataclass
class Batch:
    """One launch: the numbers of its tensors in their list, their elements, and each threadgroup's (tensor, chunk)."""

    tensors: list[int] = field(default_factory=list)
    numels: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)

    def add(self, number: int, numel: int) -> None:
        """Take one more tensor in."""
        self.tensors.append(number)
        self.numels.append(numel)

    def metadata(self) -> bytes:
        """The kernel's MetadataArguments: elements, tensor of each threadgroup, chunk of each threadgroup."""
        tensors, chunks = [tensor for tensor, _ in self.chunks], [chunk for _, chunk in self.chunks]
        return _TABLE.pack(*_padded(self.numels, TENSORS), *_padded(tensors, GROUPS), *_padded(chunks, GROUPS))

    def addresses(self, lists: Sequence[Sequence[Tensor]]) -> Pointers:
        """The kernel's argument buffer: 32 addresses for each list."""
        rest = [None] * (TENSORS - len(self.tensors))
        found = [tensor for each in lists for tensor in (*(each[number] for number in self.tensors), *rest)]
        return Pointers(found, 8 * len(found))

    @property
    def elements(self) -> int:
        """At most so many are computed."""
        return CHUNK * len(self.chunks)


def _padded(numbers: list[int], length: int) -> list[int]:
    return numbers + [0] * (length - len(numbers))


def batches(tensors: Sequence[Tensor], full: Callable[[Batch, bool], bool]) -> Iterator[Batch]:
    """The launches for a list; after each chunk `full` says of the batch, and whether the tensor is done, if it goes.

    A tensor that does not fit its launch goes on in the next one, as that one's first. Empty tensors are left out.
    """
    batch = Batch()
    for number, tensor in enumerate(tensors):
        numel = tensor.numel()
        chunks = -(-numel // CHUNK)
        if chunks:
            batch.add(number, numel)
        for chunk in range(chunks):
            batch.chunks.append((len(batch.tensors) - 1, chunk))
            if full(batch, chunk == chunks - 1):
                yield batch
                batch = Batch()
                if chunk < chunks - 1:
                    batch.add(number, numel)
    if batch.chunks:
        yield batch
