"""Copies and casts between tensors: blits (no kernel), and kernels for other strides, dtypes, conjugates and signs.

`contiguous`, `clone`, `to` and every `copy_` come through the one operator `copy_`, which a Mac's PyTorch sends on to
`_copy_from`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.fill import expanded
from hf_mps.metal.kernels.launch.iterator import Walk, plane, walk
from hf_mps.metal.kernels.launch.numbers import SCALAR_TYPES
from hf_mps.metal.kernels.launch.pointwise import ILP
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i64, padded, u32, u64

BLIT = "a blit on Metal, no kernel"
MANY = 131072
"""Elements from which a thread takes several (the threshold of copy_cast_kernel_mps)."""
RUN = 16
"""Shortest run of elements for which releases from 2.14 on take kernels of rows (INNER_CONTIGUOUS_MIN_EXTENT)."""
CHUNK = 1 << 31
"""Bytes of one launch of the byte copy."""


@rule("copy_", source="operations/Copy.mm")
def copy(release: Release, target: Tensor, given: Tensor, non_blocking: bool = False) -> Tensor:
    """Nothing where both are one run of the same bytes; else one kernel, or two through a temporary without gaps."""
    if not (given.is_mps and target.is_mps):
        return _to_the_host(release, target, given, non_blocking)
    same = given.dtype == target.dtype and given.is_neg() == target.is_neg() and given.is_conj() == target.is_conj()
    dense = target.is_contiguous()
    runs = dense and given.is_contiguous() and given.shape == target.shape
    if runs and same:
        return _bytes(release, target, given)
    if given.is_sparse or target.is_sparse or given.numel() == 0 or target.numel() == 0:
        raise NoRule("nothing to copy, or a sparse tensor")
    source = given if given.shape == target.shape else expanded(given, target)
    runs = runs or _channels_last(target, source)
    if not (runs or source.is_contiguous()) or (not same and source.storage_offset()):
        if dense:
            return cast(release, target, source)
        source = cast(release, torch.empty(source.shape, dtype=source.dtype, device=source.device), source)
    if same and (runs or dense):
        return _bytes(release, target, source)
    return cast(release, target, source)


def cast(release: Release, target: Tensor, source: Tensor) -> Tensor:
    """The kernel that writes each element as the target's dtype, over any strides (copy_cast_kernel_mps)."""
    name, way, numel = _functor(target, source), walk(target, source), target.numel()
    into, of = metal(target.dtype), metal(source.dtype)
    direct, many = into == of, numel >= MANY
    if not way.contiguous:
        _strided(release, name, target, source, way)
    elif direct and many:
        release.kernel(f"{name}_dense_{into}_{of}").launch((target, source, u32(numel)), -(-numel // ILP))
    elif direct:
        release.kernel(f"{name}_dense_scalar_{into}_{of}").launch((target, source), numel)
    elif many:
        kind = padded(u32(target.element_size(), SCALAR_TYPES[target.dtype], numel), 16)
        release.kernel(f"{name}_dense_castout_ilp_{of}").launch((target, source, kind), -(-numel // ILP))
    else:
        kind = u32(target.element_size(), SCALAR_TYPES[target.dtype])
        release.kernel(f"{name}_dense_castout_{of}").launch((target, source, kind), numel)
    return target


def _strided(release: Release, name: str, target: Tensor, source: Tensor, way: Walk) -> None:
    shape, (output, given) = way.shape, way.strides
    inner, dims = shape[0], len(shape)
    runs = output[0] == target.element_size() and given[0] == source.element_size()
    if runs and dims > 1 and inner >= RUN and "inner_contiguous_copy" in release:
        return _rows(release, name, target, source, way)
    into, of = metal(target.dtype), metal(source.dtype)
    if into == of:
        kernel, last = f"{name}_strided_{into}_{of}", u32(dims)
    else:
        kernel, last = f"{name}_strided_castout_{of}", u32(dims, SCALAR_TYPES[target.dtype])
    arguments = (target, source, i64(shape), i64(given), i64(output), last)
    release.kernel(kernel).launch(arguments, *plane(inner, target.numel() // inner))
    return None


def _rows(release: Release, name: str, target: Tensor, source: Tensor, way: Walk) -> None:
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
    release.kernel(kernel).launch(arguments, *plane(across, target.numel() // inner))


def _bytes(release: Release, target: Tensor, source: Tensor) -> Tensor:
    """The same bytes in one run: a blit; from 2.14 on a kernel, 16 bytes a thread (contiguous_copy_kernel_mps)."""
    if "contiguous_byte_copy" not in release:
        raise NoRule(BLIT)
    if target.numel() == 0 or target.is_sparse or target is source:
        raise NoRule("nothing to copy, or a sparse tensor")
    kernel, total = release.kernel("contiguous_byte_copy"), target.numel() * target.element_size()
    for base in range(0, total, CHUNK):
        size = min(CHUNK, total - base)
        kernel.launch((target, source, u32(size), u64(base)), -(-size // 16))
    return target


def _to_the_host(release: Release, target: Tensor, given: Tensor, non_blocking: bool) -> Tensor:
    """To the host a tensor with gaps is gathered on the device first (copy_from_mps_); all else is a blit."""
    if given.is_cpu or given.is_sparse or given.is_contiguous() or given.numel() == 0:
        raise NoRule("a blit between host and device, no kernel")
    source = given if given.shape == target.shape else expanded(given, target)
    if _channels_last(target, source) or source.stride() == target.stride():
        raise NoRule("a blit between host and device, no kernel")
    whole = torch.empty(source.shape, dtype=source.dtype, device=source.device)
    return target.copy_(cast(release, whole, source), non_blocking)


def _functor(target: Tensor, source: Tensor) -> str:
    negative, conjugate = target.is_neg() != source.is_neg(), target.is_conj() != source.is_conj()
    if not (negative or conjugate):
        return "copy_identity"
    if negative and conjugate and source.is_complex():
        return "copy_conj_neg"
    return "copy_neg" if negative else "copy_conj"


def _channels_last(target: Tensor, source: Tensor) -> bool:
    if target.dim() == 4:
        form = torch.channels_last
    elif target.dim() == 5:
        form = torch.channels_last_3d
    else:
        return False
    return target.is_contiguous(memory_format=form) and source.is_contiguous(memory_format=form)
