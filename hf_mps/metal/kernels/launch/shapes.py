"""Windows both ways, repetitions, margins, triangles and ranges."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.copies import wrapped
from hf_mps.metal.kernels.launch.pointwise import LARGEST_GROUP, plane
from hf_mps.metal.kernels.rules import by_meta, kernels, refuse, rule
from hf_mps.metal.kernels.values import NoRule, f32, i32, i64, metal, span, u32, u64


def _columns(
    sizes: Sequence[int], kernel: list[int], dilation: list[int], padding: list[int], stride: list[int]
) -> list[int]:
    """Return windows along the height and the width."""
    return [
        (size + 2 * pad - by * (each - 1) - 1) // step + 1
        for size, pad, by, each, step in zip(sizes, padding, dilation, kernel, stride, strict=True)
    ]


# Host: operations/Im2Col.mm.
@rule("im2col", outputs=by_meta)
def im2col(output: Tensor, self: Tensor, *windows: list[int]) -> None:
    """A thread for each window of each plane; 64 of them a group."""
    kernel_size, dilation, padding, stride = windows
    given, into = _batched(self, 4), _batched(output, 3)
    batch, planes, height, width = given.shape
    across = _columns((height, width), *windows)[1]
    _refuse_long(given, into)
    arguments = {"inputData": given, "outputData": into, "input_sizes": i32(width, height, planes, batch)}
    # The kernel's pairs begin with the width, PyTorch's with the height.
    arguments["kernel_dilation"] = u32(kernel_size[::-1], dilation[::-1])
    arguments["padding_stride"] = i32(padding[::-1], stride[::-1])
    arguments["input_strides"] = u32(given.stride()[::-1])
    arguments["output_strides"] = u32(into.stride()[::-1], across)
    kernels[f"im2col_{metal(self.dtype)}_u32"].launch(arguments, (into.shape[2], planes, batch), (64, 1, 1))


# Host: operations/Col2Im.mm.
@rule("col2im", outputs=by_meta)
def col2im(output: Tensor, self: Tensor, output_size: list[int], *windows: list[int]) -> None:
    """A thread for each element of the image, which sums the windows that it is in."""
    kernel_size, dilation, padding, stride = windows
    given, into = _batched(self, 3), _batched(output, 4)
    batch, planes, height, width = into.shape
    columns = _columns(output_size, *windows)
    _refuse_long(given, into)
    if into.numel() == 0:
        return
    pairs = {"im": [height, width], "kernel": kernel_size, "pad": padding, "stride": stride, "dilation": dilation}
    arguments: dict[str, Tensor | bytes] = {f"{name}_hw": u32(pair) for name, pair in {**pairs, "col": columns}.items()}
    arguments |= {"data_col": given, "data_im": into, "channels": u32(planes)}
    arguments |= {"col_batch_stride": u32(given.stride(0)), "im_batch_stride": u32(into.stride(0))}
    arguments["col_inner_strides"] = u32(given.stride(1), given.stride(2))
    group = (min(width, 32), min(height, LARGEST_GROUP // min(width, 32)), 1)
    kernels[f"col2im_kernel_{metal(self.dtype)}_u32"].launch(arguments, (width, height, batch * planes), group)


# Host: operations/UnfoldBackward.mm.
@rule("unfold_backward")
def unfold_backward(grad_in: Tensor, input_sizes: list[int], dim: int, size: int, step: int) -> Tensor:
    """A thread for each element of the gradient, which sums the windows it was in; windows apart are a copy."""
    output = torch.zeros(input_sizes, dtype=grad_in.dtype, device=grad_in.device)
    if grad_in.numel() and step >= size:
        output.unfold(dim, size, step).copy_(grad_in)
    elif grad_in.numel():
        arguments = {"grad_in": grad_in, "grad_out": output, "input_strides": i64(grad_in.stride())}
        arguments |= {"output_sizes": i64(output.shape), "output_strides": i64(output.stride())}
        arguments["dim_size_step_ndim"] = u32(wrapped(dim, output.dim()), size, step, output.dim())
        kernels[f"unfold_backward_{metal(grad_in.dtype)}"].launch(arguments, output.numel())
    return output


# Host: operations/Repeat.mm.
@rule("repeat_interleave.Tensor")
def repeat_interleave(repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Each place as often as it says: a thread for each. Without a size, the host waits for the sum."""
    refuse(repeats.dim() != 1 or repeats.dtype not in (torch.int64, torch.int32))
    if repeats.numel() == 0:
        return torch.empty_like(repeats)
    kernel = kernels[f"repeat_interleave_{'int64_t' if repeats.dtype == torch.int64 else 'int32_t'}"]
    # int64 as the kernel's cumsum_ptr, also where the repeats are int32.
    sums = repeats.cumsum(0)
    if output_size is None:
        refuse(int(repeats.min().item()) < 0)
        output_size = int(sums[-1].item())
    output = torch.empty(output_size, dtype=repeats.dtype, device=repeats.device)
    arguments = {"repeat_ptr": repeats, "cumsum_ptr": sums, "result_ptr": output}
    if output_size:
        kernel.launch({**arguments, "repeat_stride": i64(repeats.stride(0))}, repeats.numel())
    return output


def _batched(tensor: Tensor, dims: int) -> Tensor:
    return tensor.unsqueeze(0) if tensor.dim() == dims - 1 else tensor


def _refuse_long(*tensors: Tensor) -> None:
    refuse(any(each.numel() >= 2**31 for each in tensors), "no kernel for offsets beyond 32 bits here")


# Host: operations/TriangularOps.mm.


@rule("tril", outputs=by_meta, name="tril")
@rule("triu", outputs=by_meta, name="triu")
def triangle(output: Tensor, self: Tensor, diagonal: int = 0, *, name: str) -> None:
    """What is on the diagonal and below, or above: a thread for each element.

    The grid is its column, its row, and all other dimensions; the last dimension counts first.
    """
    count = self.numel()
    if count == 0:
        return
    refuse(max(span(output), span(self)) > 2**31 or abs(diagonal) >= 2**31, "no kernel for offsets beyond 32 bits")
    columns, rows = self.shape[-1], self.shape[-2]
    sizes, last = u32(self.shape[::-1]), i32(diagonal, self.dim())
    strides = i32(output.stride()[::-1])
    grid, group = (columns, rows, count // (columns * rows)), plane(columns, rows)[1]
    if output is self:
        kernel = kernels[f"{name}_inplace_int_{metal(self.dtype)}"]
        kernel.launch({"self": self, "strides": strides, "sizes": sizes, "k_ndim": last}, grid, group)
        return
    arguments = {"out": output, "inp": self, "out_strides": strides, "inp_strides": i32(self.stride()[::-1])}
    kernels[f"{name}_int_{metal(self.dtype)}"].launch(arguments | {"sizes": sizes, "k_ndim": last}, grid, group)


@rule("tril_indices")
def tril_indices(row: int, col: int, offset: int = 0, **options: Any) -> Tensor:
    """Rows above, then columns below, of the elements of a lower triangle: a trapezoid on top of a rectangle."""
    count, first, above = _elements(row, col, offset), _first_row(row, col, offset), max(0, -offset)
    whole = max(0, row - (above + col - first + 1)) * col
    return _indices("tril_indices", row, col, options, above, first, col, count - whole, count)


@rule("triu_indices")
def triu_indices(row: int, col: int, offset: int = 0, **options: Any) -> Tensor:
    """Rows above, then columns below, of the elements of an upper triangle: a rectangle on top of a trapezoid."""
    count = row * col - _elements(row, col, offset - 1)
    first = max(col - offset, 0) if offset > 0 else col
    whole = min(row, -offset) * col if offset < 0 else 0
    return _indices("triu_indices", row, col, options, max(0, offset), first, col, whole, count)


def _indices(name: str, row: int, col: int, options: dict[str, Any], *numbers: int) -> Tensor:
    """The indices by a kernel that takes `numbers`, of which the last is their count."""
    refuse(row < 0 or col < 0 or options.get("layout") not in (None, torch.strided))
    output = torch.empty((2, numbers[-1]), dtype=options.get("dtype") or torch.int64, device="mps")
    kernels[f"{name}_{metal(output.dtype)}"].launch((output, *map(i64, numbers)), numbers[-1])
    return output


def _first_row(row: int, col: int, offset: int) -> int:
    return min(col, 1 + offset) if offset > 0 else int(row + offset > 0)


def _elements(row: int, col: int, offset: int) -> int:
    """Return the elements of a lower triangle (get_tril_size in native/TensorFactories.h)."""
    if row == 0 or col == 0:
        return 0
    first, last = _first_row(row, col, offset), max(0, min(col, row + offset))
    rows = max(0, min(row, row + offset))
    leaning = last - first + 1
    return (first + last) * leaning // 2 + max(0, rows - leaning) * col


# Host: operations/RangeFactories.mm.
ONE_PASS = 1 << 22
"""Elements up to which a thread writes each of an identity matrix; beyond, zeros are filled in first."""
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# Host: operations/Eye.mm.
@rule("eye.out", "eye.m_out")
def eye(n: int, m: int | None = None, *, out: Tensor) -> Tensor:
    """A matrix of n rows and m columns, n of them too by default, with ones on its diagonal."""
    m = n if m is None else m
    refuse(n < 0 or m < 0)
    kernel = kernels[f"eye_{'diag_' if n * m > ONE_PASS else ''}{metal(out.dtype)}"]
    out.resize_((n, m))
    if out.numel() == 0:
        return out
    slow, fast = out.stride()
    if n * m > ONE_PASS:
        out.zero_()
        kernel.launch({"output": out, "diag_stride": i64(slow + fast)}, min(n, m))
        return out
    across, down = m, n
    # x goes along the smaller stride, so that threads side by side write side by side.
    if slow < fast:
        slow, fast, across, down = fast, slow, n, m
    kernel.launch({"output": out, "stride0": i64(slow), "stride1": i64(fast)}, *plane(across, down))
    return out


@rule("arange.start_out")
def arange(start: float, end: float, step: float = 1, *, out: Tensor) -> Tensor:
    """From a start on by a step: a thread computes its number from its place."""
    kernels.need("arange_float_i32")
    refuse(step == 0 or not all(map(math.isfinite, (start, end))) or (end - start) * step < 0)
    if out.dtype == torch.int64:
        # Of int64 PyTorch refuses a step below one, too, which narrower integers take as zero.
        refuse(abs(step) < 1)
        start, end, step = int(start), int(end), int(step)
        size = (end - start + step - (step > 0) + (step < 0)) // step
    else:
        size = math.ceil((end - start) / step)
    refuse(out.numel() not in (0, size), "the result has another shape than what it is written to")
    numbers = i64(int(start), int(step)) if out.dtype in INTEGERS else f32(start, step)
    return _stepped("arange", out, size, numbers)


@rule("linspace.out")
def linspace(start: float, end: float, steps: int, *, out: Tensor) -> Tensor:
    """From a start to an end in so many steps; integers are divided exactly."""
    kernels.need("linspace_float_i32")
    if steps < 0 or isinstance(start, complex) or isinstance(end, complex):
        raise NoRule("PyTorch refuses the arguments, or complex numbers")
    if steps == 1:
        return (out if out.numel() == 1 else out.resize_((1,))).fill_(start)
    if out.dtype in INTEGERS:
        first, last = int(start), int(end)
        each, rest = divmod(abs(last - first), max(steps - 1, 1))
        # The struct is of unsigned numbers (integral_params): a bound below zero is bound as its two's complement.
        numbers = u64(first % 2**64, last % 2**64, each, rest)
        return _stepped("linspace_integral", out, steps, numbers, steps)
    low, high = ctypes.c_float(start).value, ctypes.c_float(end).value
    by = torch.tensor(high - low, dtype=torch.float32) / max(steps - 1, 1)
    return _stepped("linspace", out, steps, f32(low, by.item(), high), steps)


def _stepped(name: str, out: Tensor, size: int, numbers: bytes, steps: int | None = None) -> Tensor:
    """A line with one stride, by 32 bits or 64; else any strides, the last dimension first."""
    kind = metal(out.dtype)
    if out.numel() != size:
        out.resize_((size,))
    if out.is_contiguous() or out.dim() == 1:
        stride = 1 if out.is_contiguous() else out.stride(0)
        small = max(size, (size - 1) * abs(stride)) < 2**31
        last = (stride,) if steps is None else (steps, stride)
        kernel = kernels[f"{name}_{kind}_{'i32' if small else 'i64'}"]
        kernel.launch((out, numbers, (i32 if small else i64)(last)), size)
        return out
    # The kernels' offset_from_thread_index takes the first dimension for the innermost.
    sizes, strides = i64(out.shape[::-1]), i64(out.stride()[::-1])
    rest = () if steps is None else (u32(steps),)
    kernels[f"{name}_strided_{kind}"].launch((out, numbers, *rest, i32(out.dim()), sizes, strides), size)
    return out
