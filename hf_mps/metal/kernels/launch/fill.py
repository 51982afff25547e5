"""Filling with one number: whole tensors by bytes (no kernel), by a kernel over gaps, and where a mask says."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import plane, walk
from hf_mps.metal.kernels.launch.pointwise import repeats
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import refuse_repeated, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i64, scalar, u32

BYTES = "a fill of bytes on Metal, no kernel"


@rule("fill_.Scalar", source="operations/ConstantOps.mm")
def fill(release: Release, self: Tensor, value: complex) -> Tensor:
    """Bytes where the tensor has no gaps, for zeros and dtypes of one byte; all else is a kernel."""
    dense = without_gaps(self)
    if self.numel() == 0 or (dense and (value == 0 or self.element_size() == 1)):
        raise NoRule(BYTES)
    number, kind = host_number(value, self.dtype), metal(self.dtype)
    if dense:
        arguments = {"out": self, "fill_val": number, "numel": u32(self.numel())}
        release.kernel(f"fill_scalar_dense_{kind}").launch(arguments, self.numel())
        return self
    way = walk(self)
    first = way.shape[0]
    inner = self.numel() // first
    layout = {"sizes": i64(way.shape), "strides": i64(way.strides[0]), "ndim": u32(len(way.shape))}
    kernel = release.kernel(f"fill_scalar_strided_{kind}")
    kernel.launch({"out": self, "fill_val": number, **layout}, *plane(inner, first))
    return self


@rule("fill_.Tensor", source="native/Fill.cpp")
def fill_with_tensor(release: Release, self: Tensor, value: Tensor) -> Tensor:
    """A copy of a number on the device to every element; a number on the host is filled in."""
    if value.dim() or self.numel() == 0:
        raise NoRule("nothing to fill, or what PyTorch refuses")
    if value.is_mps:
        self.copy_(value.clone() if value.data_ptr() == self.data_ptr() else value)
    else:
        self.fill_(value.item())
    return self


@rule("zero_", source="native/Fill.cpp")
def zero(release: Release, self: Tensor) -> Tensor:
    """The number zero, filled in."""
    fill(release, self, 0)
    return self


@rule("masked_fill_.Scalar", source="operations/Indexing.mm")
def masked_fill(release: Release, self: Tensor, mask: Tensor, value: complex) -> Tensor:
    """A thread for each element: dense, with a mask that repeats along the leading dimensions, or over any strides."""
    if self.numel() == 0 or mask.dtype != torch.bool or not mask.is_mps:
        raise NoRule("nothing to fill, or what PyTorch refuses")
    bits = 8 * self.element_size()
    over = mask if mask.shape == self.shape else expanded(mask, self)
    arguments = {"input": self, "mask": over, "val": host_number(value, self.dtype)}
    kind = "dense"
    if not (self.is_contiguous() and over.is_contiguous()):
        if self.is_contiguous() and repeats(mask, self):
            kind = "broadcast"
            arguments |= {"mask": mask, "mask_numel": u32(mask.numel())}
        else:
            kind = "strided"
            refuse_repeated(self)
            strides = {"input_strides": i64(self.stride()), "mask_strides": i64(over.stride())}
            arguments |= {"sizes": i64(tuple(self.shape)), **strides, "ndim": u32(self.dim())}
    release.kernel(f"masked_fill_scalar_{kind}_{bits}bit").launch(arguments, self.numel())
    return self


@rule("masked_fill_.Tensor", source="operations/Indexing.mm")
def masked_fill_with_tensor(release: Release, self: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    """The host reads the value, which waits for the device."""
    if value.dim():
        raise NoRule("PyTorch refuses the arguments")
    masked_fill(release, self, mask, value.item())
    return self


def host_number(value: complex, dtype: torch.dtype) -> bytes:
    """A number as a tensor's dtype has it. Raises NoRule where PyTorch refuses the conversion."""
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        limits = torch.iinfo(dtype)
        if not isinstance(value, int | float) or not limits.min <= value <= limits.max:
            raise NoRule("PyTorch refuses the number")
        return scalar(int(value), dtype)
    if not (isinstance(value, int | float) or dtype.is_complex):
        raise NoRule("PyTorch refuses the number")
    return scalar(value, dtype)


def without_gaps(tensor: Tensor) -> bool:
    """Every element of a run of memory is the tensor's, and once (is_non_overlapping_and_dense)."""
    return tensor.is_contiguous() or _without_gaps(tuple(tensor.shape), tensor.stride())


@lru_cache(maxsize=1024)
def _without_gaps(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def expanded(tensor: Tensor, like: Tensor) -> Tensor:
    """A view of the shape of `like`. Raises NoRule where the shapes do not broadcast."""
    try:
        return tensor.expand(like.shape)
    except RuntimeError:
        raise NoRule("PyTorch refuses the shapes") from None
