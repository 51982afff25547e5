"""The norm of gradients and their product with a factor, 28 of them in a dispatch, where PyTorch has one for each.

PyTorch takes the norm of each gradient, the norm of those, and multiplies each (torch/nn/utils/clip_grad.py), and Metal
has no foreach kernels for that. Here the squares of chunks are summed, and then those sums, both in float32 and in one
order in every process.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_mps.metal.training_kernels.library import Source
from hf_mps.metal.training_kernels.trial import Case, case

SOURCE = Source("clip.metal")
# Metal binds 31 buffers, of which a table, the norm and a factor take three (clip.metal).
BOUND, THREADS = 28, 256
"""Tensors that a dispatch binds, and threads of a threadgroup."""
CHUNK, CHUNKS = 16_384, 2_048
"""Elements of a chunk, and about how many chunks there may be: one threadgroup sums their sums."""


def total_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all elements, of no dimension.

    The tensors are dense, of one dtype that `library.TYPES` has and of one Metal device.
    """
    first = tensors[0]
    tables, count = _tables(tuple(each.numel() for each in tensors), first.device)
    sums = torch.empty(count, dtype=torch.float32, device=first.device)
    for bound, table in zip(_bound(tensors), tables, strict=True):
        SOURCE.kernel("squares", first.dtype)(*bound, table, sums, threads=len(table) * THREADS, group_size=THREADS)
    found = torch.empty((), dtype=first.dtype, device=first.device)
    SOURCE.kernel("norm", first.dtype)(found, sums, count, threads=THREADS, group_size=THREADS, arg_casts="int32")
    return found


def scale(tensors: Sequence[Tensor], largest: float, norm: Tensor) -> None:
    """Multiply tensors in place by `largest / norm`, where that is less than one; `norm` has their dtype."""
    tables, _ = _tables(tuple(each.numel() for each in tensors), norm.device)
    for bound, table in zip(_bound(tensors), tables, strict=True):
        SOURCE.kernel("scale", norm.dtype)(
            *bound, table, norm, float(largest), threads=len(table) * THREADS, group_size=THREADS
        )


def _bound(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield what each dispatch binds; places that are left have the first again."""
    for start in range(0, len(tensors), BOUND):
        piece = [each.detach() for each in tensors[start : start + BOUND]]
        yield [*piece, *piece[:1] * (BOUND - len(piece))]


@functools.lru_cache(maxsize=16)
def _tables(sizes: tuple[int, ...], device: torch.device) -> tuple[list[Tensor], int]:
    """Return the chunks of each dispatch, and how many there are in all."""
    length = max(CHUNK, -(-sum(sizes) // CHUNKS))
    tables, count = [], 0
    for start in range(0, len(sizes), BOUND):
        rows = []
        for place, size in enumerate(sizes[start : start + BOUND]):
            for first in range(0, size, length):
                rows.append((place, first, min(length, size - first), count))
                count += 1
        tables.append(torch.tensor(rows, dtype=torch.int32, device=device))
    return tables, count


def cases(_: str) -> Iterator[Case]:
    """Yield a small encoder's gradients, and fewer that are longer."""
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        sizes = [384 * 384 if place % 4 == 0 else 384 for place in range(64)]
        gradients = [torch.randn(size, generator=draw) for size in sizes]
        yield case(f"{len(sizes)} gradients", gradients, dtype, _ours, _stock)


def _ours(*gradients: Tensor) -> Sequence[Tensor]:
    norm = total_norm(gradients)
    scale(gradients, 1.0, norm)
    return norm, *gradients


def _stock(*gradients: Tensor) -> Sequence[Tensor]:
    total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
    factor = torch.clamp(1.0 / (total + 1e-6), max=1.0)
    for each in gradients:
        each.mul_(factor)
    return total, *gradients
