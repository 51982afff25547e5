"""Images and volumes: sampling at the places of a grid, resizing, pooling, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import GRAPH, by_meta, kernels, made, refuse, rule
from hf_mps.metal.kernels.runtime import Kernel
from hf_mps.metal.kernels.values import NoRule, f32, i32, i64, metal, padded, span, u8, u64

# Host: operations/GridSampler.mm.
INTERPOLATIONS = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
NEAREST, BICUBIC = 1, 2


@rule("grid_sampler_2d")
def grid_sampler_2d(given: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool) -> Tensor:
    """An image at places (x, y) from -1 to 1, a thread for each place."""
    _check(given, grid)
    output = given.new_empty((*given.shape[:2], *grid.shape[1:-1]))
    wide = _wide(given, grid, output)
    arguments = {"output": output, "input": given, "grid": grid}
    parameters = _sizes([output, given, grid], align_corners, wide)
    kernel = _kernel("grid_sampler_2d", [INTERPOLATIONS[interpolation], PADDINGS[padding]], wide, given.dtype)
    kernel.launch({**arguments, "params": parameters}, output.shape[0] * output.shape[2] * output.shape[3])
    return output


@rule("grid_sampler_2d_backward")
def grid_sampler_2d_backward(
    gradient: Tensor, given: Tensor, grid: Tensor, *modes: Any
) -> tuple[Tensor | None, Tensor]:
    """The image's gradient, to which every place adds atomically, and the grid's: two kernels."""
    interpolation, padding, _, output_mask = modes
    _check(given, grid)
    # Zeros to add to, or None where no gradient of the input is asked for; the grid's is written, or stays zero.
    whole = torch.contiguous_format
    of_input = torch.zeros_like(given, memory_format=whole) if output_mask[0] else None
    of_grid = (torch.zeros_like if interpolation == NEAREST else torch.empty_like)(grid, memory_format=whole)
    places = math.prod(grid.shape[:3])
    if places == 0:
        return of_input, of_grid
    wide, bicubic = _wide(gradient, given, grid, of_grid), interpolation == BICUBIC
    parameters = _backward_sizes([gradient, given, grid], [gradient, of_input, of_grid], modes, wide)
    common = {"grad_output": gradient, "grid": grid, "params": parameters}
    if of_input is not None:
        names = ["bicubic_input", PADDINGS[padding]] if bicubic else [f"{INTERPOLATIONS[interpolation]}_input"]
        kernel = _kernel("grid_sampler_2d_backward", names, wide, given.dtype)
        kernel.launch({**common, "grad_input": of_input}, places)
    if interpolation != NEAREST:
        names = ["bicubic_grid", PADDINGS[padding]] if bicubic else ["bilinear_grid"]
        kernel = _kernel("grid_sampler_2d_backward", names, wide, given.dtype)
        kernel.launch({**common, "grad_grid": of_grid, "input": given}, places)
    return of_input, of_grid


def _check(given: Tensor, grid: Tensor) -> None:
    """Raise NoRule where PyTorch refuses the arguments."""
    fits = given.dim() == grid.dim() == 4 and given.dtype == grid.dtype and given.shape[0] == grid.shape[0]
    refuse(not fits or grid.shape[-1] != 2 or 0 in given.shape[2:])


def _wide(*tensors: Tensor) -> bool:
    """Return whether an element is farther away than 32 bits count (canUse32BitIndexMath)."""
    return any(span(each) > 1 << 31 for each in tensors)


def _kernel(family: str, names: list[str], wide: bool, dtype: torch.dtype) -> Kernel:
    """Return the kernel for 32 or 64 bits."""
    return kernels["_".join([family, *names, "i64" if wide else "i32", metal(dtype)])]


def _sizes(tensors: list[Tensor], align_corners: bool, wide: bool) -> bytes:
    """GridSamplerParams: sizes and strides of the result, the input and the grid."""
    number, width = (i64, 8) if wide else (i32, 4)
    arrays = b"".join(number(each.shape, each.stride()) for each in tensors)
    whole = padded(i32(tensors[0].dim() - 2), width) + arrays + bytes([align_corners])
    return padded(whole, -(-len(whole) // width) * width)


def _backward_sizes(forward: list[Tensor], strided: list[Tensor | None], modes: tuple[Any, ...], wide: bool) -> bytes:
    """GridSamplerBackwardParams: the above, three tensors' strides, the modes, and which gradients are asked for."""
    number, width = (i64, 8) if wide else (i32, 4)
    arrays = [each.stride() if each is not None else [0] * forward[0].dim() for each in strided]
    interpolation, padding, align_corners, _ = modes
    asked = bytes([strided[1] is not None, interpolation != NEAREST])
    whole = _sizes(forward, align_corners, wide) + number(*arrays) + i32(padding, interpolation) + asked
    return padded(whole, -(-len(whole) // width) * width)


# Host: operations/UpSample.mm.

Ints = Sequence[int]
Scales = Sequence[float | None]


def scale(size: int, result: int, align_corners: bool, given: float | None) -> float:
    """Return elements of the input for one of the result (area_pixel_compute_scale)."""
    if align_corners:
        return (size - 1) / (result - 1) if result > 1 else 0.0
    return 1.0 / given if given is not None and given > 0 else size / result


def _launch(kernel: Kernel, buffers: dict[str, Tensor], align_corners: bool, scales: Scales) -> None:
    """`buffers` are the input or its gradient, then the result or its gradient; `scales` begin with the depth."""
    small, large = buffers.values()
    places = enumerate(scales, -len(scales))
    factors = [scale(small.shape[at], large.shape[at], align_corners, given) for at, given in places][::-1]
    arguments: dict[str, Any] = dict(buffers)
    declared = kernel.signature.at(2)
    if declared is not None and declared.name == "params":
        placed = u64(small.stride(), small.shape, large.stride(), large.shape) + f32(factors)
        arguments["params"] = padded(placed + bytes([align_corners]), declared.size)
    else:
        # In one dimension the host binds a second scale, which no kernel reads.
        for name, each in (("input", small), ("output", large)):
            arguments[f"{name}_strides"] = padded(u64(each.stride()), 32)
            arguments[f"{name}_sizes"] = padded(i64(each.shape), 32)
        arguments |= {"scales": padded(f32(factors), 8), "align_corners": bytes([align_corners])}
    kernel.launch(arguments, math.prod(large.shape[2:]))


def forward(output: Tensor, given: Tensor, size: Ints, *rest: Any, names: list[str], kernel: str, **named: Any) -> None:
    """Fill `output` from `given`."""
    found = _resizing(kernel, given)
    if output.numel():
        _launch(found, {"inputData": given, "outputData": output}, *_options(names, rest, named))


def backward(
    result: Tensor, gradient: Tensor, size: Ints, of: Ints, *rest: Any, names: list[str], kernel: str, **named: Any
) -> None:
    """Fill `result`, the input's gradient, from that of the result: zeros, to which every place adds atomically."""
    found = _resizing(f"{kernel}_backward", result)
    result.zero_()
    if gradient.numel():
        _launch(found, {"gradInputData": result, "gradOutputData": gradient}, *_options(names, rest, named))


def _resizing(name: str, like: Tensor) -> Kernel:
    whole = f"upsample_{name}_{metal(like.dtype)}"
    refuse(whole not in kernels and f"upsample_{name}_float" not in kernels, GRAPH)
    return kernels[whole]


def _options(names: list[str], rest: tuple[Any, ...], named: dict[str, Any]) -> tuple[bool, Scales]:
    given = {**dict(zip(names, rest, strict=False)), **named}
    return bool(given.get("align_corners")), [given.get(name) for name in names if name != "align_corners"]


RESIZES = (
    "upsample_nearest1d=nearest1d upsample_nearest2d=nearest2d upsample_nearest3d=nearest_3d* "
    "_upsample_nearest_exact1d=nearest_exact1d _upsample_nearest_exact2d=nearest_exact2d "
    "_upsample_nearest_exact3d=nearest_exact_3d* upsample_linear1d=linear1d upsample_bilinear2d=bilinear2d "
    "upsample_bicubic2d=bicubic2d* _upsample_bilinear2d_aa=bilinear2d_aa* _upsample_bicubic2d_aa=bicubic2d_aa* "
    "upsample_trilinear3d=trilinear*"
)
"""Operators and their kernels, with a star where the gradient has kernels in a release up to 2.14.1; that of the others
is MPSGraph in all."""
SCALES = {"1d": ["scales"], "2d": ["scales_h", "scales_w"], "3d": ["scales_d", "scales_h", "scales_w"]}

for _word in RESIZES.split():
    _operator, _, _kernel_name = _word.rstrip("*").partition("=")
    _names = SCALES[_operator.removesuffix("_aa")[-2:]]
    _fixed: dict[str, Any] = {"kernel": _kernel_name, "outputs": by_meta}
    _fixed["names"] = _names if "nearest" in _operator else ["align_corners", *_names]
    rule(_operator, **_fixed)(forward)
    if _word.endswith("*"):
        rule(f"{_operator}_backward", **_fixed)(backward)


# Host: operations/Pooling.mm.
DIMENSIONS = 5
"""Of the arrays in the kernels' structs."""


Windows = Sequence[list[int]]
"""Kernel, stride, padding and dilation, of height and width each."""


def _windows(kernel: Ints, stride: Ints = (), padding: Ints = (0,), dilation: Ints = (1,), *_: Any) -> Windows:
    return [[each[0], each[-1]] for each in (kernel, stride or kernel, padding, dilation)]


def _arrays(*tensors: Tensor) -> bytes:
    """Return sizes and strides of each tensor, five numbers each."""
    return b"".join(_array(part) for each in tensors for part in (each.shape, each.stride()))


def _array(numbers: Ints) -> bytes:
    return padded(i32(tuple(numbers)), 4 * DIMENSIONS)


def _each(*numbers: Ints) -> bytes:
    """Return numbers of the pooled dimensions, three places each."""
    return b"".join(padded(i32(part), 4 * (DIMENSIONS - 2)) for part in numbers)


@rule("max_pool2d_with_indices", outputs=by_meta)
def max_pool2d(outputs: tuple[Tensor, Tensor | None], given: Tensor, *ways: Any) -> None:
    """Windows that move by one element are MPSGraph's; places are for a gradient."""
    output, places = outputs
    windows = _windows(*ways)
    refuse(windows[1] == [1, 1], GRAPH)
    placed = _arrays(given, output) + (_arrays(places) if places is not None else bytes(8 * DIMENSIONS))
    parameters = i32(given.dim(), 2) + placed + _each(*windows) + i32(places is not None)
    arguments = {"input": given, "output": output, "indices": places, "params": parameters}
    kernels[f"max_pool_{metal(given.dtype)}"].launch(arguments, output.numel())


@rule("max_pool2d")
def max_pool2d_alone(given: Tensor, *ways: Any) -> Tensor:
    """The same without places, which the operator has no Meta kernel for."""
    output: Tensor = made(torch.ops.aten.max_pool2d_with_indices.default, (given, *ways), {})[0]
    max_pool2d((output, None), given, *ways)
    return output


@rule("avg_pool2d", outputs=by_meta)
def avg_pool2d(output: Tensor, given: Tensor, *ways: Any) -> None:
    """Windows that may not reach over the end (without `ceil_mode`) are MPSGraph's."""
    ceil_mode, include_pad, divisor = (*ways[3:], *(False, True, None)[len(ways[3:]) :])[:3]
    refuse(not ceil_mode, GRAPH)
    kernel, step, pad, _ = _windows(*ways[:3])
    sides = {"input": given, "output": output}
    parameters = {"dims": i32(given.dim()), "pooling_dims": i32(2)}
    parameters |= {f"{side}_sizes": _array(each.shape) for side, each in sides.items()}
    parameters |= {f"{side}_strides": _array(each.stride()) for side, each in sides.items()}
    parameters |= {"kernel_size": _each(kernel), "stride": _each(step), "padding": _each(pad)}
    parameters |= {"count_include_pad": u8(include_pad), "has_divisor_override": u8(divisor is not None)}
    parameters["divisor_override"] = i32(divisor or 0)
    kernels[f"avg_pool_{metal(given.dtype)}"].launch({**sides, "params": parameters}, output.numel())


# Host: operations/AdaptivePooling.mm.
@rule("adaptive_max_pool2d", outputs=by_meta)
def adaptive_max_pool2d(outputs: tuple[Tensor, Tensor], given: Tensor, output_size: Ints) -> None:
    """From 2.14 on the kernel has the bounds of each window.

    Before, it is one ordinary pooling with the stride that the sizes give: wrong where they do not divide
    (pytorch#190064).
    """
    output, places = outputs
    sizes, maxima = given.shape[-2:], kernels[f"max_pool_{metal(given.dtype)}"]
    struct = maxima.signature.at(3)
    if struct is not None and any(member.name == "adaptive" for member in struct.members):
        # Kernel, stride, padding, dilation, which an adaptive pool does not read; two booleans, two bytes of nothing.
        rest = padded(i32(1, 1), 12) * 2 + bytes(12) + padded(i32(1, 1), 12) + bytes([True, True, 0, 0])
        bound = {"input": given, "output": output, "indices": places}
        maxima.launch({**bound, "params": i32(given.dim(), 2) + _arrays(given, output, places) + rest}, output.numel())
        return
    if any(size < wanted for size, wanted in zip(sizes, output_size, strict=True)):
        raise NoRule("a result that is larger than what is pooled")
    stride = [size // wanted for size, wanted in zip(sizes, output_size, strict=True)]
    kernel = [size - (wanted - 1) * step for size, wanted, step in zip(sizes, output_size, stride, strict=True)]
    torch.ops.aten.max_pool2d_with_indices.out(given, kernel, stride, out=output, indices=places)
