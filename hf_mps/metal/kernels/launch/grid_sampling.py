"""Sampling of images and volumes at the places that a grid names, and its gradients.

All facts are of operations/GridSampler.mm and kernels/GridSampler.h. A thread computes one place of an image in all
channels, or one element of a volume; sizes and strides have 64 bits where 32 do not do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import Kernel, NoRule
from hf_mps.metal.kernels.values import i32, i64, padded, span

SOURCE = "operations/GridSampler.mm"
INTERPOLATIONS = ("bilinear", "nearest", "bicubic")
PADDINGS = ("zeros", "border", "reflection")
BILINEAR, NEAREST, BICUBIC = range(3)

Gradients = tuple[Tensor | None, Tensor]


@rule("grid_sampler_2d", source=SOURCE)
def grid_sampler_2d(
    release: Release, given: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool
) -> Tensor:
    """An image at places (x, y) from -1 to 1."""
    _check(given, grid, 4)
    names = [INTERPOLATIONS[interpolation], PADDINGS[padding]]
    output = given.new_empty((*given.shape[:2], *grid.shape[1:3]))
    wide = _wide(given, grid, output)
    kernel = _kernel(release, "grid_sampler_2d", names, wide, given.dtype)
    parameters = _sizes([output, given, grid], align_corners, wide)
    places = output.shape[0] * output.shape[2] * output.shape[3]
    kernel.launch({"output": output, "input": given, "grid": grid, "params": parameters}, places)
    return output


@rule("grid_sampler_3d", source=SOURCE)
def grid_sampler_3d(
    release: Release, given: Tensor, grid: Tensor, interpolation: int, padding: int, align_corners: bool
) -> Tensor:
    """A volume at places (x, y, z)."""
    _check(given, grid, 5)
    if interpolation == BICUBIC:
        raise NoRule("PyTorch refuses the arguments")
    output = given.new_empty((*given.shape[:2], *grid.shape[1:4]))
    wide = _wide(given, grid, output)
    names = [INTERPOLATIONS[interpolation], PADDINGS[padding]]
    kernel = _kernel(release, "grid_sampler_3d", names, wide, given.dtype)
    parameters = _sizes([output, given, grid], align_corners, wide)
    kernel.launch({"output": output, "input": given, "grid": grid, "params": parameters}, output.numel())
    return output


@rule("grid_sampler_2d_backward", source=SOURCE)
def grid_sampler_2d_backward(
    release: Release,
    gradient: Tensor,
    given: Tensor,
    grid: Tensor,
    interpolation: int,
    padding: int,
    align_corners: bool,
    output_mask: list[bool],
) -> Gradients:
    """The image's gradient, to which every place adds atomically, and the grid's: two kernels."""
    _check(given, grid, 4)
    of_input, of_grid = _gradients(given, grid, interpolation, output_mask)
    places = grid.shape[0] * grid.shape[1] * grid.shape[2]
    if places == 0:
        return of_input, of_grid
    wide = _wide(gradient, given, grid, of_grid)
    way, pad = INTERPOLATIONS[interpolation], PADDINGS[padding]
    parameters = _backward_sizes(
        [gradient, given, grid], [gradient, of_input, of_grid], (padding, interpolation), align_corners, wide
    )
    if of_input is not None:
        names = ["bicubic_input", pad] if interpolation == BICUBIC else [f"{way}_input"]
        kernel = _kernel(release, "grid_sampler_2d_backward", names, wide, given.dtype)
        kernel.launch({"grad_input": of_input, "grad_output": gradient, "grid": grid, "params": parameters}, places)
    if interpolation != NEAREST:
        names = ["bicubic_grid", pad] if interpolation == BICUBIC else ["bilinear_grid"]
        kernel = _kernel(release, "grid_sampler_2d_backward", names, wide, given.dtype)
        kernel.launch(
            {"grad_grid": of_grid, "grad_output": gradient, "input": given, "grid": grid, "params": parameters}, places
        )
    return of_input, of_grid


@rule("grid_sampler_3d_backward", source=SOURCE)
def grid_sampler_3d_backward(
    release: Release,
    gradient: Tensor,
    given: Tensor,
    grid: Tensor,
    interpolation: int,
    padding: int,
    align_corners: bool,
    output_mask: list[bool],
) -> Gradients:
    """Both gradients of a volume by one kernel."""
    _check(given, grid, 5)
    if interpolation == BICUBIC:
        raise NoRule("PyTorch refuses the arguments")
    of_input, of_grid = _gradients(given, grid, interpolation, output_mask)
    if of_input is None and interpolation == NEAREST:
        return of_input, of_grid
    given, grid, gradient = given.contiguous(), grid.contiguous(), gradient.contiguous()
    wide = _wide(gradient, given, grid, of_grid)
    kernel = _kernel(release, "grid_sampler_3d_backward", [], wide, given.dtype)
    parameters = _backward_sizes(
        [gradient, given, grid], [gradient, of_input, of_grid], (padding, interpolation), align_corners, wide
    )
    kernel.launch(
        {
            "grad_output": gradient,
            "input": given,
            "grid": grid,
            "grad_input": of_input if of_input is not None else given.new_zeros(1),
            "grad_grid": of_grid,
            "params": parameters,
        },
        (grid.shape[3], grid.shape[2] * grid.shape[1], given.shape[0]),
        (16, 16, 1),
    )
    return of_input, of_grid


def _check(given: Tensor, grid: Tensor, dimensions: int) -> None:
    """Raises NoRule where PyTorch refuses the arguments."""
    fits = given.dim() == grid.dim() == dimensions and given.dtype == grid.dtype and given.shape[0] == grid.shape[0]
    if not fits or grid.shape[-1] != dimensions - 2 or 0 in given.shape[2:]:
        raise NoRule("PyTorch refuses the arguments")


def _wide(*tensors: Tensor) -> bool:
    """Whether an element lies farther than 32 bits count (canUse32BitIndexMath)."""
    return any(span(each) > 1 << 31 for each in tensors)


def _kernel(release: Release, family: str, names: list[str], wide: bool, dtype: torch.dtype) -> Kernel:
    """The kernel for 32 or 64 bits."""
    return release.kernel("_".join([family, *names, "i64" if wide else "i32", metal(dtype)]))


def _sizes(tensors: list[Tensor], align_corners: bool, wide: bool) -> bytes:
    """GridSamplerParams: sizes and strides of the result, the input and the grid."""
    number, width = (i64, 8) if wide else (i32, 4)
    arrays = b"".join(number(each.shape, each.stride()) for each in tensors)
    whole = padded(i32(tensors[0].dim() - 2), width) + arrays + bytes([align_corners])
    return padded(whole, -(-len(whole) // width) * width)


def _backward_sizes(
    forward: list[Tensor], strided: list[Tensor | None], modes: tuple[int, int], align_corners: bool, wide: bool
) -> bytes:
    """GridSamplerBackwardParams: the above, three tensors' strides, the modes, and which gradients are asked for."""
    number, width = (i64, 8) if wide else (i32, 4)
    arrays = [each.stride() if each is not None else [0] * forward[0].dim() for each in strided]
    asked = bytes([strided[1] is not None, modes[1] != NEAREST])
    whole = _sizes(forward, align_corners, wide) + number(*arrays) + i32(modes) + asked
    return padded(whole, -(-len(whole) // width) * width)


def _gradients(given: Tensor, grid: Tensor, interpolation: int, output_mask: list[bool]) -> Gradients:
    """Zeros to add to, or None where no gradient of the input is asked for; the grid's is written, or stays zero."""
    whole = torch.contiguous_format
    of_input = torch.zeros_like(given, memory_format=whole) if output_mask[0] else None
    make = torch.zeros_like if interpolation == NEAREST else torch.empty_like
    return of_input, make(grid, memory_format=whole)
