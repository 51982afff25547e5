"""Bags of embeddings: sums, means and maxima of rows, forward and backward."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import errors, kernels, refuse, rule
from hf_mps.metal.kernels.values import DIMENSIONS, NoRule, i32, i64, metal, span, u8, u32

# Host: operations/EmbeddingBag.mm.
STRIDED = "a sparse gradient, or indices of another layout"
CPUS = "a forward pass on the CPU, which leaves out the bag that an index is in"
_SUM, _MAX = 0, 2


@rule("_embedding_bag", "_embedding_bag_forward_only")
def embedding_bag(weight: Tensor, indices: Tensor, offsets: Tensor, *options: Any) -> tuple[Tensor, ...]:
    """A thread for each element of each bag's row.

    `options` are scale_grad_by_freq and sparse, which gradients alone read, among the mode, the weights of samples,
    include_last_offset and padding_idx. An index out of range is reported to the buffer of errors: the device's own
    kernel then words the error.
    """
    given = (*options, *(False, 0, False, None, False, -1)[len(options) :])
    _, mode, _, per_sample_weights, include_last_offset, padding_idx = given[:6]
    if (indices.dim(), offsets.dim(), weight.dim()) != (1, 1, 2) or (include_last_offset and not len(offsets)):
        raise NoRule("shapes that PyTorch refuses")
    if per_sample_weights is not None and per_sample_weights.dtype != weight.dtype:
        raise NoRule("weights of another dtype than the table's")
    common = torch.promote_types(indices.dtype, offsets.dtype)
    refuse(common not in (torch.int64, torch.int32), "indices of a dtype that PyTorch refuses")
    kernel = kernels[f"embedding_bag_{metal(weight.dtype)}_{metal(common)}"]
    indices, offsets = (each.to(common).contiguous() for each in (indices, offsets))
    bags, size = len(offsets) - include_last_offset, weight.shape[1]
    _require_32_bits(weight)
    output = torch.empty(bags, size, dtype=weight.dtype, device=weight.device)
    offset2bag, bag_size = indices.new_empty(len(indices)), indices.new_empty(len(offsets))
    largest = indices.new_empty((bags, size) if mode == _MAX else (0,))
    parameters = {"weight_strides": u32(weight.stride()), "output_strides": u32(output.stride())}
    parameters |= {"num_indices": u32(len(indices)), "num_bags": u32(bags), "num_weights": u32(weight.shape[0])}
    parameters |= _shared(largest, mode, per_sample_weights, size, padding_idx)
    bound = [weight, indices, offsets, per_sample_weights, output, offset2bag, bag_size, largest, parameters]
    kernel.launch([*bound, errors.tensor], output.numel())
    refuse(errors.any(), "an index out of range")
    return output, offset2bag, bag_size, largest


# Host: ../EmbeddingBag.cpp.
@rule("_embedding_bag_backward")
def choose_backward(grad: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, *rest: Any) -> Tensor:
    """What autograd calls: hands a dense gradient on."""
    bag_size, largest, rows, by_frequency, mode, sparse, *weighted = rest
    refuse(sparse or not (indices.is_contiguous() and offset2bag.is_contiguous()), STRIDED)
    refuse(len(offset2bag) != len(indices), CPUS)
    return backward(grad, indices, offset2bag, bag_size, largest, rows, by_frequency, mode, *weighted)


@rule("_embedding_bag_dense_backward")
def backward(
    grad: Tensor, indices: Tensor, offset2bag: Tensor, bag_size: Tensor, largest: Tensor, rows: int, *options: Any
) -> Tensor:
    """Atomic additions in the gradient's dtype; of maxima a thread for each of theirs."""
    _, mode, per_sample_weights, padding_idx = (*options, -1)[:4]
    kernel = kernels[f"embedding_bag_backward_{metal(grad.dtype)}_{metal(indices.dtype)}"]
    size = grad.shape[1]
    _require_32_bits(grad)
    found = torch.zeros(rows, size, dtype=grad.dtype, device=grad.device)
    parameters = {"weight_grad_strides": u32(found.stride()), "output_grad_strides": u32(grad.stride())}
    parameters |= _shared(largest, mode, per_sample_weights, size, padding_idx)
    threads = grad.numel() if mode == _MAX else offset2bag.numel() * size
    kernel.launch([grad, indices, offset2bag, bag_size, largest, per_sample_weights, found, parameters], threads)
    return found


@rule("_embedding_bag_per_sample_weights_backward")
def weights_backward(
    grad: Tensor, weight: Tensor, indices: Tensor, offsets: Tensor, offset2bag: Tensor, mode: int, padding_idx: int = -1
) -> Tensor:
    """The product of each index's row with its bag's gradient, added up atomically."""
    refuse(mode != _SUM, "weights of samples outside of a sum")
    refuse(not (indices.is_contiguous() and offset2bag.is_contiguous()), STRIDED)
    refuse(len(offset2bag) != len(indices), CPUS)
    kernel = kernels[f"embedding_bag_per_sample_weights_backward_{metal(grad.dtype)}_{metal(indices.dtype)}"]
    size = grad.shape[1]
    _require_32_bits(weight)
    found = torch.zeros(len(indices), dtype=grad.dtype, device=grad.device)
    parameters = {"output_grad_strides": u32(grad.stride()), "weight_strides": u32(weight.stride())}
    parameters |= {"per_sample_weights_grad_stride": u32(1), "feature_size": u32(size), "padding_idx": i64(padding_idx)}
    kernel.launch([grad, weight, indices, offset2bag, found, parameters], len(indices) * size)
    return found


def _shared(largest: Tensor, mode: int, weights: Tensor | None, size: int, padding_idx: int) -> dict[str, bytes]:
    """Return what both directions are told, by the members' names (kernels/EmbeddingBag.h), offsets in 32 bits."""
    shared = {"max_indices_strides": u32(largest.stride() if mode == _MAX else (0, 0)), "mode": i32(mode)}
    shared |= {"use_per_sample_weights": u8(weights is not None), "feature_size": u32(size)}
    shared["per_sample_weights_stride"] = u32(0 if weights is None else weights.stride(0))
    return shared | {"padding_idx": i64(padding_idx)}


def _require_32_bits(tensor: Tensor) -> None:
    if max(tensor.numel(), *(size * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))) >> 32:
        raise NoRule("more than 2**32 elements")


_PARAMETERS = struct.Struct(f"<{3 * DIMENSIONS}I3I4xq?7x")
"""EmbeddingDenseBackwardParams with offsets of 32 bits (kernels/Embedding.h)."""


# Host: operations/Embedding.mm.
@rule("embedding_dense_backward")
def dense_backward(grad: Tensor, indices: Tensor, rows: int, padding_index: int, scale_grad_by_freq: bool) -> Tensor:
    """Rows are summed in float32 by atomic additions, and cast to the gradient's dtype in the end."""
    refuse(indices.dtype not in (torch.int64, torch.int32), "indices of a dtype that PyTorch refuses")
    size, count = grad.shape[-1], indices.numel()
    integer = metal(indices.dtype)
    kernel = kernels[f"embedding_dense_backward_{metal(grad.dtype)}_{integer}_32"]
    refuse(grad.dim() != indices.dim() + 1 or indices.dim() >= DIMENSIONS, "shapes that PyTorch refuses")
    refuse(max(count, span(grad), span(indices), rows * size) >= 1 << 31, "more than 2**31 elements")
    if count == 0 or size == 0 or rows == 0:
        return torch.zeros(rows, size, dtype=grad.dtype, device=grad.device)
    sums = torch.zeros(rows, size, dtype=torch.float32, device=grad.device)
    arrays = (indices.shape, grad.stride()[:-1], indices.stride())
    numbers = [number for each in arrays for number in (*each, *[0] * (DIMENSIONS - len(each)))]
    parameters = _PARAMETERS.pack(*numbers, grad.stride(-1), indices.dim(), size, padding_index, scale_grad_by_freq)
    # Any buffer: the kernel reads the counts with scale_grad_by_freq alone.
    counts = sums
    if scale_grad_by_freq:
        counts = torch.zeros(rows, dtype=torch.int32, device=grad.device)
        counting = kernels[f"embedding_dense_backward_count_{integer}_32"]
        counting.launch({"indices": indices, "counts": counts, "params": parameters}, count)
    arguments = {"grad": grad, "indices": indices, "counts": counts, "grad_weight": sums, "params": parameters}
    kernel.launch(arguments, count * size)
    return sums if grad.dtype == torch.float32 else sums.to(grad.dtype)
