"""Tensors made of numbers: identity matrices, and from 2.14 on ranges with a step or a number of steps."""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import plane
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, i32, i64, u32, u64

SOURCE = "operations/RangeFactories.mm"
GRAPH = "MPSGraph on this release"
ONE_PASS = 1 << 22
"""Elements up to which a thread writes each of an identity matrix; beyond, zeros are filled in first."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@rule("eye.out", source="operations/Eye.mm")
def eye(release: Release, n: int, *, out: Tensor) -> Tensor:
    """An identity matrix."""
    eye_of(release, n, n, out=out)
    return out


@rule("eye.m_out", source="operations/Eye.mm")
def eye_of(release: Release, n: int, m: int, *, out: Tensor) -> Tensor:
    """A matrix of n rows and m columns with ones on its diagonal."""
    if n < 0 or m < 0:
        raise NoRule("PyTorch refuses the arguments")
    kind = metal(out.dtype)
    name = f"eye_{kind}" if n * m <= ONE_PASS else f"eye_diag_{kind}"
    kernel = release.kernel(name)
    out.resize_((n, m))
    if out.numel() == 0:
        return out
    slow, fast = out.stride()
    if n * m > ONE_PASS:
        out.zero_()
        kernel.launch({"output": out, "diag_stride": i64(slow + fast)}, min(n, m))
        return out
    across, down = m, n
    if slow < fast:
        slow, fast, across, down = fast, slow, n, m
    kernel.launch({"output": out, "stride0": i64(slow), "stride1": i64(fast)}, *plane(across, down))
    return out


@rule("arange.start_out", source=SOURCE)
def arange(release: Release, start: float, end: float, step: float = 1, *, out: Tensor) -> Tensor:
    """From a start on by a step: a thread computes its number from its place."""
    if "arange_float_i32" not in release:
        raise NoRule(GRAPH)
    if step == 0 or not all(map(math.isfinite, (start, end))) or (end - start) * step < 0:
        raise NoRule("PyTorch refuses the arguments")
    if out.dtype == torch.int64:
        start, end, step = int(start), int(end), int(step)
        size = (end - start + step - (step > 0) + (step < 0)) // step if step else 0
    else:
        size = math.ceil((end - start) / step)
    if out.numel() not in (0, size):
        raise NoRule("the result has another shape than what it is written to")
    numbers = i64(int(start), int(step)) if out.dtype in INTEGERS else f32(start, step)
    return _stepped(release, "arange", out, size, numbers)


@rule("linspace.out", source=SOURCE)
def linspace(release: Release, start: float, end: float, steps: int, *, out: Tensor) -> Tensor:
    """From a start to an end in so many steps; integers are divided exactly."""
    if "linspace_float_i32" not in release:
        raise NoRule(GRAPH)
    if steps < 0 or isinstance(start, complex) or isinstance(end, complex):
        raise NoRule("PyTorch refuses the arguments, or complex numbers")
    if steps == 1:
        return (out if out.numel() == 1 else out.resize_((1,))).fill_(start)
    if out.dtype in INTEGERS:
        first, last = int(start), int(end)
        each, rest = divmod(abs(last - first), max(steps - 1, 1))
        numbers = u64(first % 2**64, last % 2**64, each, rest)
        return _stepped(release, "linspace_integral", out, steps, numbers, steps)
    low, high = ctypes.c_float(start).value, ctypes.c_float(end).value
    by = torch.tensor(high - low, dtype=torch.float32) / max(steps - 1, 1)
    return _stepped(release, "linspace", out, steps, f32(low, by.item(), high), steps)


def _stepped(release: Release, name: str, out: Tensor, size: int, numbers: bytes, steps: int | None = None) -> Tensor:
    """A line with one stride, by 32 bits or 64; else any strides, the last dimension first."""
    kind = metal(out.dtype)
    if out.numel() != size:
        out.resize_((size,))
    if size == 0:
        return out
    if out.is_contiguous() or out.dim() == 1:
        stride = 1 if out.is_contiguous() else out.stride(0)
        small = max(size, (size - 1) * abs(stride)) < 2**31
        last = (stride,) if steps is None else (steps, stride)
        kernel = release.kernel(f"{name}_{kind}_{'i32' if small else 'i64'}")
        kernel.launch((out, numbers, (i32 if small else i64)(last)), size)
        return out
    sizes, strides = i64(out.shape[::-1]), i64(out.stride()[::-1])
    rest = () if steps is None else (u32(steps),)
    release.kernel(f"{name}_strided_{kind}").launch((out, numbers, *rest, i32(out.dim()), sizes, strides), size)
    return out
