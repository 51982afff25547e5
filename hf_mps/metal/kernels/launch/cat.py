"""Concatenation: a launch for each input, which copies it to its place."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.copy import CHUNK
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import MISFIT, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i32, i64, padded, u32, u64

DIMENSIONS = 16
"""Dimensions that a kernel's structs have room for."""
SOURCE = "operations/Shape.mm"


@rule("cat", "cat.out", source=SOURCE)
def cat(release: Release, tensors: list[Tensor], dim: int = 0, *, out: Tensor | None = None) -> Tensor:
    """Into a new tensor: contiguous, unless every input suggests one channels-last format; or into one of its shape."""
    shape, dtype = _shape(tensors, dim), _dtype(tensors)
    if out is None:
        form = torch.contiguous_format if all(each.is_contiguous() for each in tensors) else _format(tensors)
        out = torch.empty(shape, dtype=dtype, device=tensors[0].device, memory_format=form)
    elif list(out.shape) != shape or not torch.can_cast(dtype, out.dtype):  # PyTorch resizes it
        raise NoRule(MISFIT)
    elif any(each.untyped_storage().data_ptr() == out.untyped_storage().data_ptr() for each in tensors):
        raise NoRule("an input shares memory with the output")
    _join(release, out, tensors, wrapped(dim, out.dim()))
    return out


def _shape(tensors: list[Tensor], dim: int) -> list[int]:
    """The result's shape; tensors of one dimension and no elements are passed over."""
    there = [each for each in tensors if each.dim() != 1 or each.shape[0]]
    first = there[0] if there else tensors[0]
    dim = wrapped(dim, first.dim())
    same = _but(first.shape, dim)
    if first.dim() == 0 or any(each.dim() != first.dim() or _but(each.shape, dim) != same for each in there):
        raise NoRule("PyTorch refuses the shapes")
    shape = list(first.shape)
    shape[dim] = sum(each.shape[dim] for each in there)
    return shape


def _dtype(tensors: list[Tensor]) -> torch.dtype:
    found = tensors[0].dtype
    for each in tensors:
        if each.dtype != found:
            found = torch.promote_types(found, each.dtype)
    return found


def _format(tensors: list[Tensor]) -> torch.memory_format:
    formats = {suggest_memory_format(each) for each in tensors}
    return formats.pop() if len(formats) == 1 else torch.contiguous_format


def _join(release: Release, output: Tensor, tensors: list[Tensor], dim: int) -> None:
    if any(not each.is_mps for each in tensors) or output.dim() == 0:
        raise NoRule("PyTorch refuses the arguments")
    if output.numel() == 0:
        return
    whole = all(each.is_contiguous() and each.dtype == output.dtype for each in (output, *tensors))
    if whole and "inner_contiguous_scatter_u32" in release:
        _join_rows(release, output, tensors, dim)
        return
    wide = any(each.numel() >= 2**31 for each in (output, *tensors))
    index, offset = "int64_t" if wide else "int32_t", 0
    shared = i32(output.dim(), dim) + _layout(wide, output.stride(), tuple(output.shape))
    for each in tensors:
        count = each.numel()
        if count >= 2**31:
            raise NoRule("2**31 elements or more, which the host launches in parts")
        if count:
            own = (i64 if wide else i32)(offset, 0) + _layout(wide, each.stride(), tuple(each.shape))
            kernel = release.kernel(f"cat_{index}_{metal(each.dtype)}_{metal(output.dtype)}")
            kernel.launch({"input": each, "output": output, "shared_params": shared, "input_params": own}, count)
        if each.dim() == output.dim():
            offset += each.shape[dim]


def _join_rows(release: Release, output: Tensor, tensors: list[Tensor], dim: int) -> None:
    """Contiguous inputs of one dtype, from 2.14 on: 16 bytes a thread, in runs that lie at regular distances."""
    inner = math.prod(output.shape[dim + 1 :]) * output.element_size()
    small = output.numel() * output.element_size() < 2**32
    kernel = release.kernel(f"inner_contiguous_scatter_{'u32' if small else 'u64'}")
    packed, apart, offset = u32 if small else u64, output.shape[dim] * inner, 0
    for each in tensors:
        size = each.numel() * each.element_size()
        if size == 0:
            continue
        run = each.shape[dim] * inner
        for base in range(0, size, CHUNK):
            here = min(CHUNK, size - base)
            params = packed(base, run, apart, offset) + u32(here)
            # The struct of 64-bit numbers has a hole at its end.
            params = params if small else padded(params, 40)
            kernel.launch({"input": each, "output": output, "params": params}, -(-here // 16))
        offset += run


@lru_cache(maxsize=1024)
def _layout(wide: bool, strides: tuple[int, ...], shape: tuple[int, ...]) -> bytes:
    """The strides and the shape of a tensor, as a struct has them: arrays, with what is left of them empty."""
    packed, size = (i64, 8 * DIMENSIONS) if wide else (i32, 4 * DIMENSIONS)
    return padded(packed(strides), size) + padded(packed(shape), size)


def _but(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def wrapped(dim: int, dims: int) -> int:
    """A dimension counted from the front. Raises NoRule where there is no such dimension."""
    if not -max(dims, 1) <= dim < max(dims, 1):
        raise NoRule("PyTorch refuses the dimension")
    return dim % max(dims, 1)
