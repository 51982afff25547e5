"""Gradients of embeddings: a thread adds an element of a row's gradient to its row of the table."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from hf_mps.kernels.dtypes import metal
from hf_mps.kernels.release import Release
from hf_mps.kernels.rules import rule
from hf_mps.kernels.runtime import NoRule
from hf_mps.kernels.values import span

_DIMENSIONS = 16
_PARAMETERS = struct.Struct(f"<{3 * _DIMENSIONS}I3I4xq?7x")
"""EmbeddingDenseBackwardParams with offsets of 32 bits (kernels/Embedding.h)."""


@rule("embedding_dense_backward", source="operations/Embedding.mm")
def dense_backward(
    release: Release, grad: Tensor, indices: Tensor, rows: int, padding_index: int, scale_grad_by_freq: bool
) -> Tensor:
    """Rows are summed in float32 by atomic additions, and cast to the gradient's dtype in the end."""
    if indices.dtype not in (torch.int64, torch.int32):
        raise NoRule("indices of a dtype that PyTorch refuses")
    size, count = grad.shape[-1], indices.numel()
    integer = metal(indices.dtype)
    kernel = release.kernel(f"embedding_dense_backward_{metal(grad.dtype)}_{integer}_32")
    if grad.dim() != indices.dim() + 1 or indices.dim() >= _DIMENSIONS:
        raise NoRule("shapes that PyTorch refuses")
    if max(count, span(grad), span(indices), rows * size) >= 1 << 31:
        raise NoRule("more than 2**31 elements")
    if count == 0 or size == 0 or rows == 0:
        return torch.zeros(rows, size, dtype=grad.dtype, device=grad.device)
    sums = torch.zeros(rows, size, dtype=torch.float32, device=grad.device)
    parameters = _PARAMETERS.pack(
        *_sixteen(indices.shape),
        *_sixteen(grad.stride()[:-1]),
        *_sixteen(indices.stride()),
        *(grad.stride(-1), indices.dim(), size, padding_index, scale_grad_by_freq),
    )
    counts = sums
    if scale_grad_by_freq:
        counts = torch.zeros(rows, dtype=torch.int32, device=grad.device)
        counting = release.kernel(f"embedding_dense_backward_count_{integer}_32")
        counting.launch({"indices": indices, "counts": counts, "params": parameters}, count)
    arguments = {"grad": grad, "indices": indices, "counts": counts, "grad_weight": sums, "params": parameters}
    kernel.launch(arguments, count * size)
    return sums if grad.dtype == torch.float32 else sums.to(grad.dtype)


def _sixteen(numbers: torch.Size | tuple[int, ...]) -> list[int]:
    return [*numbers, *(0 for _ in range(_DIMENSIONS - len(numbers)))]
