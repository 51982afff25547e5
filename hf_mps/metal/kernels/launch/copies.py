"""Copies, casts, fills and concatenation: blits (no kernel), and kernels for other strides, dtypes and signs.

`contiguous`, `clone`, `to` and every `copy_` come through the one operator `copy_`, which a Mac's PyTorch sends on to
`_copy_from`.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.pointwise import ILP, SCALAR_TYPES, Walk, plane, repeats, unary, walk
from hf_mps.metal.kernels.rules import by_meta, kernels, refuse, refuse_repeated, rule
from hf_mps.metal.kernels.values import DIMENSIONS, NoRule, i32, i64, metal, padded, scalar, u32, u64

BYTES = "a fill of bytes on Metal, no kernel"


# Host: operations/ConstantOps.mm.
@rule("fill_.Scalar")
@rule("zero_", value=0)
def fill(self: Tensor, value: complex) -> Tensor:
    """Bytes where the tensor has no gaps, for zeros and dtypes of one byte; all else is a kernel."""
    dense = torch.ops.aten.is_non_overlapping_and_dense(self)
    refuse(self.numel() == 0 or (dense and (value == 0 or self.element_size() == 1)), BYTES)
    number, kind = host_number(value, self.dtype), metal(self.dtype)
    if dense:
        arguments = {"out": self, "fill_val": number, "numel": u32(self.numel())}
        kernels[f"fill_scalar_dense_{kind}"].launch(arguments, self.numel())
        return self
    # x counts the other dimensions' elements here and y the first one's: a unary kernel's grid is the other way round.
    way = walk(self)
    first = way.shape[0]
    inner = self.numel() // first
    layout = {"sizes": i64(way.shape), "strides": i64(way.strides[0]), "ndim": u32(len(way.shape))}
    kernels[f"fill_scalar_strided_{kind}"].launch({"out": self, "fill_val": number, **layout}, *plane(inner, first))
    return self


# Host: native/Fill.cpp.
@rule("fill_.Tensor")
def fill_with_tensor(self: Tensor, value: Tensor) -> Tensor:
    """A copy of a number on the device to every element; a number on the host is filled in."""
    refuse(value.dim() or self.numel() == 0, "nothing to fill, or what PyTorch refuses")
    if value.is_mps:
        self.copy_(value.clone() if value.data_ptr() == self.data_ptr() else value)
    else:
        self.fill_(value.item())
    return self


# Host: operations/Indexing.mm.
@rule("masked_fill_.Scalar", "masked_fill_.Tensor")
def masked_fill(self: Tensor, mask: Tensor, value: Tensor | complex) -> Tensor:
    """A thread for each element: dense, with a mask that repeats along the leading dimensions, or over any strides.

    A value that is a tensor is read by the host, which waits for the device.
    """
    if isinstance(value, Tensor):
        refuse(value.dim())
        value = value.item()
    refuse(self.numel() == 0 or mask.dtype != torch.bool or not mask.is_mps, "nothing to fill, or what PyTorch refuses")
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
    kernels[f"masked_fill_scalar_{kind}_{bits}bit"].launch(arguments, self.numel())
    return self


def host_number(value: complex, dtype: torch.dtype) -> bytes:
    """Return a number as a tensor's dtype has it. Raises NoRule where PyTorch refuses the conversion."""
    if not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool):
        limits = torch.iinfo(dtype)
        if not isinstance(value, int | float) or not limits.min <= value <= limits.max:
            raise NoRule("PyTorch refuses the number")
        return scalar(int(value), dtype)
    refuse(not (isinstance(value, int | float) or dtype.is_complex), "PyTorch refuses the number")
    return scalar(value, dtype)


def expanded(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a view of the shape of `like`. Raises NoRule where the shapes do not broadcast."""
    try:
        return tensor.expand(like.shape)
    except RuntimeError:
        raise NoRule("PyTorch refuses the shapes") from None


BLIT = "a blit on Metal, no kernel"
MANY = 131072
"""Elements from which a thread takes several (the threshold of copy_cast_kernel_mps)."""
RUN = 16
"""Shortest run of elements for which releases from 2.14 on take kernels of rows (INNER_CONTIGUOUS_MIN_EXTENT)."""
CHUNK = 1 << 31
"""Bytes of one launch of the byte copy."""


# Host: operations/Copy.mm.
@rule("copy_")
def copy(target: Tensor, given: Tensor, non_blocking: bool = False) -> Tensor:
    """Nothing where both are one run of the same bytes; else one kernel, or two through a temporary without gaps."""
    if not (given.is_mps and target.is_mps):
        return _to_the_host(target, given, non_blocking)
    same = given.dtype == target.dtype and given.is_neg() == target.is_neg() and given.is_conj() == target.is_conj()
    dense = target.is_contiguous()
    runs = dense and given.is_contiguous() and given.shape == target.shape
    if runs and same:
        return _bytes(target, given)
    if given.is_sparse or target.is_sparse or given.numel() == 0 or target.numel() == 0:
        raise NoRule("nothing to copy, or a sparse tensor")
    source = given if given.shape == target.shape else expanded(given, target)
    runs = runs or _channels_last(target, source)
    if not (runs or source.is_contiguous()) or (not same and source.storage_offset()):
        if dense:
            return cast(target, source)
        source = cast(torch.empty(source.shape, dtype=source.dtype, device=source.device), source)
    return _bytes(target, source) if same and (runs or dense) else cast(target, source)


def cast(target: Tensor, source: Tensor) -> Tensor:
    """The kernel that writes each element as the target's dtype, over any strides (copy_cast_kernel_mps)."""
    negative, conjugate = target.is_neg() != source.is_neg(), target.is_conj() != source.is_conj()
    name = "copy_neg" if negative else "copy_conj" if conjugate else "copy_identity"
    if negative and conjugate and source.is_complex():
        name = "copy_conj_neg"
    way = walk(target, source)
    steps = [each[0] for each in way.strides if each]
    runs = steps == [target.element_size(), source.element_size()] and len(way.shape) > 1 and way.shape[0] >= RUN
    if not way.contiguous and runs and "inner_contiguous_copy" in kernels:
        _rows(name, target, source, way)
    else:
        # A copy of any dtype takes several elements a thread, and from fewer on than other operators.
        unary(target, source, name, many=target.numel() >= MANY)
    return target


def _rows(name: str, target: Tensor, source: Tensor, way: Walk) -> None:
    """Runs of elements, several a thread: the bytes of equal dtypes, else a functor with a cast (2.14 and later)."""
    shape, (output, given) = way.shape, way.strides
    into, of, inner = metal(target.dtype), metal(source.dtype), shape[0]
    across, length = -(-inner // ILP), u32(len(shape) - 1, inner)
    if into != of:
        kernel = f"{name}_inner_contiguous_castout_{of}"
        length = u32(len(shape) - 1, inner, target.element_size(), SCALAR_TYPES[target.dtype])
    elif name == "copy_identity":
        kernel, size = "inner_contiguous_copy", inner * target.element_size()
        across, length = -(-size // 16), u32(len(shape) - 1, size)
    else:
        kernel = f"{name}_inner_contiguous_{into}_{of}"
    arguments = (target, source, i64(shape[1:]), i64(given[1:]), i64(output[1:]), length)
    kernels[kernel].launch(arguments, *plane(across, target.numel() // inner))


def _bytes(target: Tensor, source: Tensor) -> Tensor:
    """The same bytes in one run: a blit; from 2.14 on a kernel, 16 bytes a thread (contiguous_copy_kernel_mps)."""
    refuse("contiguous_byte_copy" not in kernels, BLIT)
    refuse(target.numel() == 0 or target.is_sparse or target is source, "nothing to copy, or a sparse tensor")
    kernel, total = kernels["contiguous_byte_copy"], target.numel() * target.element_size()
    for base in range(0, total, CHUNK):
        size = min(CHUNK, total - base)
        kernel.launch((target, source, u32(size), u64(base)), -(-size // 16))
    return target


def _to_the_host(target: Tensor, given: Tensor, non_blocking: bool) -> Tensor:
    """To the host a tensor with gaps is gathered on the device first (copy_from_mps_); all else is a blit."""
    if given.is_cpu or given.is_sparse or given.is_contiguous() or given.numel() == 0:
        raise NoRule("a blit between host and device, no kernel")
    source = given if given.shape == target.shape else expanded(given, target)
    if _channels_last(target, source) or source.stride() == target.stride():
        raise NoRule("a blit between host and device, no kernel")
    whole = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    return target.copy_(cast(whole, source), non_blocking)


def _channels_last(target: Tensor, source: Tensor) -> bool:
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(target.dim())
    return form is not None and all(each.is_contiguous(memory_format=form) for each in (target, source))


# Host: operations/Shape.mm.


@rule("cat", outputs=by_meta)
def cat(output: Tensor, tensors: list[Tensor], dim: int = 0) -> None:
    """Tensors of one dimension and no elements are passed over."""
    dim = wrapped(dim, output.dim())
    refuse(any(not each.is_mps for each in tensors) or output.dim() == 0)
    if output.numel() == 0:
        return
    whole = all(each.is_contiguous() and each.dtype == output.dtype for each in (output, *tensors))
    if whole and "inner_contiguous_scatter_u32" in kernels:
        _join_rows(output, tensors, dim)
        return
    wide = any(each.numel() >= 2**31 for each in (output, *tensors))
    index, offset = "int64_t" if wide else "int32_t", 0
    shared = i32(output.dim(), dim) + _layout(wide, output.stride(), tuple(output.shape))
    for each in tensors:
        count = each.numel()
        refuse(count >= 2**31, "2**31 elements or more, which the host launches in parts")
        if count:
            own = (i64 if wide else i32)(offset, 0) + _layout(wide, each.stride(), tuple(each.shape))
            kernel = kernels[f"cat_{index}_{metal(each.dtype)}_{metal(output.dtype)}"]
            kernel.launch({"input": each, "output": output, "shared_params": shared, "input_params": own}, count)
        if each.dim() == output.dim():
            offset += each.shape[dim]


def _join_rows(output: Tensor, tensors: list[Tensor], dim: int) -> None:
    """Contiguous inputs of one dtype, from 2.14 on: 16 bytes a thread, in runs at regular distances."""
    inner = math.prod(output.shape[dim + 1 :]) * output.element_size()
    small = output.numel() * output.element_size() < 2**32
    kernel = kernels[f"inner_contiguous_scatter_{'u32' if small else 'u64'}"]
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
    """Return the strides and the shape of a tensor, as a struct has them: arrays, with what is left of them empty."""
    packed, size = (i64, 8 * DIMENSIONS) if wide else (i32, 4 * DIMENSIONS)
    return padded(packed(strides), size) + padded(packed(shape), size)


def wrapped(dim: int, dims: int) -> int:
    """Return a dimension counted from the front. Raises NoRule where there is no such dimension."""
    refuse(not -max(dims, 1) <= dim < max(dims, 1), "PyTorch refuses the dimension")
    return dim % max(dims, 1)
