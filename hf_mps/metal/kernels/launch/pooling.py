"""Pooling in two and three dimensions, its gradients, unpooling, and adaptive pooling that becomes ordinary pooling.

All facts are of operations/Pooling.mm, kernels/Pooling.h and operations/AdaptivePooling.mm. One thread computes one
element; a struct says sizes and strides of up to five dimensions, the last two or three of which are pooled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.errors import errors
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import refuse_misfit, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i32, padded

SOURCE = "operations/Pooling.mm"
ADAPTIVE_SOURCE = "operations/AdaptivePooling.mm"
DIMENSIONS = 5
"""Of the arrays in the kernels' structs."""

Ints = Sequence[int]


class Window:
    """The pooled dimensions of a call: kernel, stride, padding and dilation of each, and the shape of the result."""

    def __init__(
        self, given: Tensor, pooled: int, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints, ceil_mode: bool
    ) -> None:
        """Raises NoRule where PyTorch refuses the arguments."""
        leading = given.dim() - pooled
        if leading not in (1, 2) or any(size == 0 for size in given.shape[leading - 1 :]):
            raise NoRule("PyTorch refuses the arguments")
        self.pooled, self.kernel = pooled, _all(kernel, pooled)
        self.stride = _all(stride, pooled) if len(stride) else self.kernel
        self.padding, self.dilation = _all(padding, pooled), _all(dilation, pooled)
        ways = zip(given.shape[leading:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        pools = [_size(*way, ceil_mode) for way in ways]
        halves = any(pad < 0 or 2 * pad > size for pad, size in zip(self.padding, self.kernel, strict=True))
        if halves or min(self.stride) < 1 or min(pools) < 1:
            raise NoRule("PyTorch refuses the arguments")
        self.shape = (*given.shape[:leading], *pools)


def _all(numbers: Ints, count: int) -> list[int]:
    return list(numbers) if len(numbers) == count else [numbers[0]] * count


def _size(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil_mode: bool) -> int:
    """Windows along a dimension; with `ceil_mode` the last may reach over the end, and begins before it."""
    last = size + 2 * padding - dilation * (kernel - 1) - 1
    count = (last + (stride - 1 if ceil_mode else 0)) // max(stride, 1) + 1
    return count - (ceil_mode and (count - 1) * stride >= size + padding)


def _layout(given: Tensor) -> torch.memory_format:
    """The memory format of the result: that of the input."""
    if given.is_contiguous():
        return torch.contiguous_format
    if given.dim() == 4 and given.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if given.dim() == 5 and given.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format


def _arrays(*tensors: Tensor, sizes: bool = True) -> bytes:
    """Sizes and strides of each tensor, five numbers each; strides alone without `sizes`."""
    parts = []
    for each in tensors:
        parts += [each.shape, each.stride()] if sizes else [each.stride()]
    return b"".join(padded(i32(part), 4 * DIMENSIONS) for part in parts)


def _each(window: Window, *numbers: Ints) -> bytes:
    """Numbers of the pooled dimensions, three places each."""
    return b"".join(padded(i32(part), 4 * (DIMENSIONS - 2)) for part in numbers)


def _target(like: Tensor, shape: Ints, out: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or like.dtype
    if out is None:
        return torch.empty(shape, dtype=dtype, device=like.device, memory_format=_layout(like))
    refuse_misfit(out, shape, dtype)
    return out


@rule("max_pool3d_with_indices_backward", "max_pool3d_with_indices_backward.grad_input", source=SOURCE)
def max_pool3d_with_indices_backward(
    release: Release,
    gradient: Tensor,
    given: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    ceil_mode: bool,
    indices: Tensor,
    *,
    grad_input: Tensor | None = None,
) -> Tensor:
    """Each element of the gradient is added where its maximum was, atomically."""
    window = Window(given, 3, kernel_size, stride, padding, dilation, ceil_mode)
    if gradient.shape != torch.Size(window.shape) or indices.shape != gradient.shape:
        raise NoRule("PyTorch refuses the arguments")
    kernel = release.kernel(f"max_pool_backward_{metal(given.dtype)}")
    result = _target(given, given.shape, grad_input).zero_()
    placed = _arrays(result, gradient) + _arrays(indices, sizes=False)
    kernel.launch(
        {
            "grad_input": result,
            "grad_output": gradient,
            "indices": indices,
            "params": i32(given.dim(), window.pooled) + placed,
        },
        gradient.numel(),
    )
    return result


def _average(given: Tensor, result: Tensor, window: Window, include_pad: bool, divisor: int | None) -> bytes:
    """AvgPoolingParams, of the input's side and the pooled side; two booleans are followed by two bytes of nothing."""
    flags = bytes([include_pad, divisor is not None, 0, 0])
    ways = _each(window, window.kernel, window.stride, window.padding)
    return i32(given.dim(), window.pooled) + _arrays(given, result) + ways + flags + i32(divisor or 0)


@rule("avg_pool3d_backward", "avg_pool3d_backward.grad_input", source=SOURCE)
def avg_pool3d_backward(
    release: Release,
    gradient: Tensor,
    given: Tensor,
    kernel_size: Ints,
    stride: Ints,
    padding: Ints,
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    *,
    grad_input: Tensor | None = None,
) -> Tensor:
    """Each element of the gradient is shared among its window, atomically."""
    window = Window(given, 3, kernel_size, stride, padding, (1,), ceil_mode)
    if gradient.shape != torch.Size(window.shape):
        raise NoRule("PyTorch refuses the arguments")
    kernel = release.kernel(f"avg_pool_backward_{metal(given.dtype)}")
    result = _target(given, given.shape, grad_input).zero_()
    parameters = _average(result, gradient, window, count_include_pad, divisor_override)
    kernel.launch({"grad_input": result, "grad_output": gradient, "params": parameters}, gradient.numel())
    return result


class Pool:
    """The operators that are alike in two and three dimensions."""

    def __init__(self, pooled: int) -> None:
        self.pooled = pooled

    def maximum(
        self,
        release: Release,
        given: Tensor,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = (0,),
        dilation: Ints = (1,),
        ceil_mode: bool = False,
        *,
        out: Tensor | None = None,
        indices: Tensor | None = None,
        with_places: bool = True,
    ) -> Any:
        """In two dimensions windows that move by one element are MPSGraph's; places are for a gradient."""
        window = Window(given, self.pooled, kernel_size, stride, padding, dilation, ceil_mode)
        if window.stride == [1, 1]:
            raise NoRule("MPSGraph on this release")
        output = _target(given, window.shape, out)
        places = _target(given, window.shape, indices, torch.int64) if with_places else None
        placed = _arrays(given, output) + (_arrays(places) if places is not None else bytes(8 * DIMENSIONS))
        ways = _each(window, window.kernel, window.stride, window.padding, window.dilation)
        parameters = i32(given.dim(), window.pooled) + placed + ways + i32(places is not None)
        release.kernel(f"max_pool_{metal(given.dtype)}").launch(
            {"input": given, "output": output, "indices": places, "params": parameters}, output.numel()
        )
        return (output, places) if with_places else output

    def average(
        self,
        release: Release,
        given: Tensor,
        kernel_size: Ints,
        stride: Ints = (),
        padding: Ints = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """In two dimensions windows that may not reach over the end (`ceil_mode`) are MPSGraph's."""
        if self.pooled == 2 and not ceil_mode:
            raise NoRule("MPSGraph on this release")
        window = Window(given, self.pooled, kernel_size, stride, padding, (1,), ceil_mode)
        kernel = release.kernel(f"avg_pool_{metal(given.dtype)}")
        output = _target(given, window.shape, out)
        parameters = _average(given, output, window, count_include_pad, divisor_override)
        kernel.launch({"input": given, "output": output, "params": parameters}, output.numel())
        return output

    def unpool(
        self,
        release: Release,
        given: Tensor,
        indices: Tensor,
        output_size: Ints,
        stride: Ints = (),
        padding: Ints = (),
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Zeros, and every element at its place; in three dimensions stride and padding say nothing more."""
        leading = given.dim() - self.pooled
        fits = leading in (1, 2) and len(output_size) == self.pooled and indices.shape == given.shape
        if not fits or indices.dtype != torch.int64 or given.numel() == 0 or min(output_size) < 1:
            raise NoRule("PyTorch refuses the arguments")
        kernel = release.kernel(f"max_unpool_{metal(given.dtype)}")
        output = _target(given, (*given.shape[:leading], *output_size), out).zero_()
        parameters = i32(given.dim(), self.pooled) + _arrays(given, output) + _arrays(indices, sizes=False)
        arguments = {"output": output, "input": given, "indices": indices, "params": parameters}
        reported = errors()
        arguments["error_buffer"] = reported.tensor
        kernel.launch(arguments, given.numel())
        if reported.any():
            raise NoRule("a place outside the result")
        return output


for pool in (Pool(2), Pool(3)):
    for name, function in (
        (f"max_pool{pool.pooled}d_with_indices", pool.maximum),
        (f"avg_pool{pool.pooled}d", pool.average),
        (f"max_unpool{pool.pooled}d", pool.unpool),
    ):
        rule(name, f"{name}.out", source=SOURCE)(function)
rule("max_pool2d", source=SOURCE, with_places=False)(Pool(2).maximum)


@rule("adaptive_max_pool2d", "adaptive_max_pool2d.out", source=ADAPTIVE_SOURCE)
def adaptive_max_pool2d(
    release: Release,
    given: Tensor,
    output_size: Ints,
    *,
    out: Tensor | None = None,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One ordinary pooling with the stride that the sizes give: wrong where they do not divide (pytorch#190064)."""
    sizes = given.shape[-2:]
    if given.dim() not in (3, 4) or any(
        wanted < 1 or size < wanted for size, wanted in zip(sizes, output_size, strict=True)
    ):
        raise NoRule("a result that is larger than what is pooled")
    stride = [size // wanted for size, wanted in zip(sizes, output_size, strict=True)]
    kernel = [size - (wanted - 1) * step for size, wanted, step in zip(sizes, output_size, stride, strict=True)]
    call = torch.ops.aten.max_pool2d_with_indices
    if out is None:
        pooled: tuple[Tensor, Tensor] = call(given, kernel, stride)
        return pooled
    written: tuple[Tensor, Tensor] = call.out(given, kernel, stride, out=out, indices=indices)
    return written
