"""Windows both ways, repetitions, margins of a line, and cross products."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.cat import wrapped
from hf_mps.metal.kernels.launch.iterator import LARGEST_GROUP, broadcast
from hf_mps.metal.kernels.launch.results import fitting
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i32, i64, u32


def _columns(
    sizes: Sequence[int], kernel: list[int], dilation: list[int], padding: list[int], stride: list[int]
) -> list[int]:
    """Windows along the height and the width. Raises NoRule where PyTorch refuses the arguments."""
    numbers = (*kernel, *dilation, *stride)
    if any(len(each) != 2 for each in (kernel, dilation, padding, stride)) or min(numbers) < 1 or min(padding) < 0:
        raise NoRule("PyTorch refuses the arguments")
    found = [
        (size + 2 * pad - by * (each - 1) - 1) // step + 1
        for size, pad, by, each, step in zip(sizes, padding, dilation, kernel, stride, strict=True)
    ]
    if min(found) < 1 or min(sizes) < 1:
        raise NoRule("PyTorch refuses the shapes")
    return found


def _unfolded(target: Tensor | None, self: Tensor, kernel: list[int], *rest: list[int]) -> Tensor:
    if self.dim() not in (3, 4) or 0 in self.shape[1:]:
        raise NoRule("PyTorch refuses the shapes")
    length = math.prod(_columns(self.shape[-2:], kernel, *rest))
    shape = (*self.shape[:-3], self.shape[-3] * math.prod(kernel), length)
    return _new(target, shape, self)


def _folded(target: Tensor | None, self: Tensor, sizes: list[int], kernel: list[int], *rest: list[int]) -> Tensor:
    if self.dim() not in (2, 3) or len(sizes) != 2 or 0 in self.shape[1:]:
        raise NoRule("PyTorch refuses the shapes")
    if self.shape[-1] != math.prod(_columns(sizes, kernel, *rest)) or self.shape[-2] % math.prod(kernel):
        raise NoRule("PyTorch refuses the shapes")
    return _new(target, (*self.shape[:-2], self.shape[-2] // math.prod(kernel), *sizes), self)


def _padded(target: Tensor | None, self: Tensor, padding: list[int]) -> Tensor:
    if self.dim() not in (2, 3) or 0 in self.shape[1:] or len(padding) != 2 or self.shape[-1] + sum(padding) < 1:
        raise NoRule("PyTorch refuses the shapes")
    return _new(target, (*self.shape[:-1], self.shape[-1] + sum(padding)), self)


def _crossed(target: Tensor | None, self: Tensor, other: Tensor, *, dim: int = -1) -> Tensor:
    shape = broadcast(tuple(self.shape), tuple(other.shape))
    if shape is None or self.dim() != other.dim() or self.dtype != other.dtype or self.dim() == 0:
        raise NoRule("PyTorch refuses the arguments")
    if self.shape[wrapped(dim, self.dim())] != 3 or other.shape[wrapped(dim, self.dim())] != 3:
        raise NoRule("PyTorch refuses the shapes")
    return _new(target, shape, self)


def _new(target: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    if target is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    return fitting(target, shape, like.dtype)


@out_rule("im2col", source="operations/Im2Col.mm", outputs=_unfolded)
def im2col(
    release: Release,
    output: Tensor,
    self: Tensor,
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> None:
    """A thread for each window of each plane; 64 of them a group."""
    given, into = _batched(self, 4), _batched(output, 3)
    batch, planes, height, width = given.shape
    across = _columns((height, width), kernel_size, dilation, padding, stride)[1]
    _refuse_long(given, into)
    if into.numel() == 0:
        return
    arguments = {
        "inputData": given,
        "outputData": into,
        "kernel_dilation": u32(kernel_size[1], kernel_size[0], dilation[1], dilation[0]),
        "padding_stride": i32(padding[1], padding[0], stride[1], stride[0]),
        "input_strides": u32(given.stride()[::-1]),
        "output_strides": u32(*into.stride()[::-1], across),
        "input_sizes": i32(width, height, planes, batch),
    }
    kernel = release.kernel(f"im2col_{metal(self.dtype)}_u32")
    kernel.launch(arguments, (into.shape[2], planes, batch), (64, 1, 1))


@out_rule("col2im", source="operations/Col2Im.mm", outputs=_folded)
def col2im(
    release: Release,
    output: Tensor,
    self: Tensor,
    output_size: list[int],
    kernel_size: list[int],
    dilation: list[int],
    padding: list[int],
    stride: list[int],
) -> None:
    """A thread for each element of the image, which sums the windows that it is in."""
    given, into = _batched(self, 3), _batched(output, 4)
    batch, planes, height, width = into.shape
    columns = _columns(output_size, kernel_size, dilation, padding, stride)
    _refuse_long(given, into)
    if into.numel() == 0:
        return
    arguments = {
        "data_col": given,
        "data_im": into,
        "col_batch_stride": u32(given.stride(0)),
        "channels": u32(planes),
        "im_hw": u32(height, width),
        "kernel_hw": u32(kernel_size),
        "pad_hw": u32(padding),
        "stride_hw": u32(stride),
        "dilation_hw": u32(dilation),
        "col_hw": u32(columns),
        "im_batch_stride": u32(into.stride(0)),
        "col_inner_strides": u32(given.stride(1), given.stride(2)),
    }
    across = min(width, 32)
    kernel = release.kernel(f"col2im_kernel_{metal(self.dtype)}_u32")
    kernel.launch(arguments, (width, height, batch * planes), (across, min(height, LARGEST_GROUP // across), 1))


@rule("unfold_backward", source="operations/UnfoldBackward.mm")
def unfold_backward(
    release: Release, grad_in: Tensor, input_sizes: list[int], dim: int, size: int, step: int
) -> Tensor:
    """A thread for each element of the gradient, which sums the windows it was in; windows apart are a copy."""
    output = torch.zeros(input_sizes, dtype=grad_in.dtype, device=grad_in.device)
    if grad_in.numel() == 0:
        return output
    if step >= size:
        output.unfold(dim, size, step).copy_(grad_in)
        return output
    arguments = {
        "grad_in": grad_in,
        "grad_out": output,
        "input_strides": i64(grad_in.stride()),
        "output_sizes": i64(output.shape),
        "output_strides": i64(output.stride()),
        "dim_size_step_ndim": u32(wrapped(dim, output.dim()), size, step, output.dim()),
    }
    release.kernel(f"unfold_backward_{metal(grad_in.dtype)}").launch(arguments, output.numel())
    return output


@rule("repeat_interleave.Tensor", source="operations/Repeat.mm")
def repeat_interleave(release: Release, repeats: Tensor, *, output_size: int | None = None) -> Tensor:
    """Each place as often as it says: a thread for each. Without a size, the host waits for the sum."""
    if repeats.dim() != 1 or repeats.dtype not in (torch.int64, torch.int32):
        raise NoRule("PyTorch refuses the arguments")
    if repeats.numel() == 0:
        return torch.empty_like(repeats)
    kernel = release.kernel(f"repeat_interleave_{'int64_t' if repeats.dtype == torch.int64 else 'int32_t'}")
    strided = any(each.name == "repeat_stride" for each in kernel.signature.bindings)
    given = repeats if strided else repeats.contiguous()
    sums = repeats.cumsum(0)
    if output_size is None:
        if int(repeats.min().item()) < 0:
            raise NoRule("PyTorch refuses the arguments")
        output_size = int(sums[-1].item())
    output = torch.empty(output_size, dtype=repeats.dtype, device=repeats.device)
    arguments: dict[str, Tensor | bytes] = {"repeat_ptr": given, "cumsum_ptr": sums, "result_ptr": output}
    if strided:
        arguments["repeat_stride"] = i64(given.stride(0))
    if output_size:
        kernel.launch(arguments, repeats.numel())
    return output


@out_rule("replication_pad1d", source="operations/Pad.mm", outputs=_padded)
def replication_pad1d(release: Release, output: Tensor, self: Tensor, padding: list[int]) -> None:
    """A thread for each element of the result."""
    given, into = _batched(self.contiguous(), 3), _batched(output, 3)
    if not into.is_contiguous():
        raise NoRule("an output that is not contiguous")
    batch, planes, width = into.shape
    sizes = i32(given.shape[2], width, *padding)
    kernel = release.kernel(f"replication_pad1d_forward_{metal(self.dtype)}")
    kernel.launch({"input": given, "output": into, "sizes_pad": sizes}, (width, planes, batch))


@rule("replication_pad1d_backward", source="operations/Pad.mm")
def replication_pad1d_backward(release: Release, grad_output: Tensor, self: Tensor, padding: list[int]) -> Tensor:
    """A thread for each element of the input, which sums where it was copied to."""
    if grad_output.shape[-1] != self.shape[-1] + sum(padding):
        raise NoRule("PyTorch refuses the shapes")
    output = torch.empty(self.shape, dtype=grad_output.dtype, device=self.device)
    given, into = _batched(grad_output.contiguous(), 3), _batched(output, 3)
    batch, planes, width = into.shape
    if into.numel() == 0:
        return output
    sizes = i32(width, given.shape[2], *padding)
    kernel = release.kernel(f"replication_pad1d_backward_{metal(self.dtype)}")
    kernel.launch({"grad_output": given, "grad_input": into, "sizes_pad": sizes}, (width, planes, batch))
    return output


@out_rule("linalg_cross", source="operations/CrossKernel.mm", outputs=_crossed)
def cross(release: Release, output: Tensor, self: Tensor, other: Tensor, *, dim: int = -1) -> None:
    """A thread for each vector of three."""
    first, second = self.expand(output.shape), other.expand(output.shape)
    dim, count = wrapped(dim, output.dim()), output.numel() // 3
    if count == 0:
        return
    kind = metal(output.dtype)
    if all(each.is_contiguous() for each in (output, first, second)):
        arguments = {"out": output, "input": first, "other": second, "dim_stride": u32(output.stride(dim))}
        release.kernel(f"cross_dense_{kind}").launch(arguments, count)
        return
    shape = output.shape
    arguments = {
        "out": output,
        "input": first,
        "other": second,
        "squashed_sizes": i64((*shape[:dim], *shape[dim + 1 :])) or i64(1),
        "out_strides": i64(output.stride()),
        "input_strides": i64(first.stride()),
        "other_strides": i64(second.stride()),
        "ndim": u32(output.dim()),
        "dim": u32(dim),
    }
    release.kernel(f"cross_strided_{kind}").launch(arguments, count)


def _batched(tensor: Tensor, dims: int) -> Tensor:
    return tensor.unsqueeze(0) if tensor.dim() == dims - 1 else tensor


def _refuse_long(*tensors: Tensor) -> None:
    if any(each.numel() >= 2**31 for each in tensors):
        raise NoRule("no kernel for offsets beyond 32 bits here")
