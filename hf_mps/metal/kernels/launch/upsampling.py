"""Resizing: nearest, linear, bilinear, bicubic and trilinear, with and without antialiasing, and their gradients.

All facts are of operations/UpSample.mm and kernels/UpSample.h. A thread computes one place of the result in all
batches and channels. Up to 2.13 the kernels of one and two dimensions take sizes and strides as vectors, later ones
and those of three dimensions a struct; the kernel says which.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule
from hf_mps.metal.kernels.runtime import Kernel, NoRule
from hf_mps.metal.kernels.values import f32, i64, padded, u64

SOURCE = "operations/UpSample.mm"

Ints = Sequence[int]
Scales = Sequence[float | None]


def scale(size: int, result: int, align_corners: bool, given: float | None) -> float:
    """Elements of the input for one of the result (area_pixel_compute_scale)."""
    if align_corners:
        return (size - 1) / (result - 1) if result > 1 else 0.0
    return 1.0 / given if given is not None and given > 0 else size / result


def _launch(kernel: Kernel, buffers: dict[str, Tensor], align_corners: bool, scales: Scales) -> None:
    """`buffers` are the input or its gradient, then the result or its gradient; `scales` begin with the depth."""
    small, large = buffers.values()
    factors = [
        scale(small.shape[at - len(scales)], large.shape[at - len(scales)], align_corners, given)
        for at, given in enumerate(scales)
    ]
    factors.reverse()
    arguments: dict[str, Any] = dict(buffers)
    declared = kernel.signature.at(2)
    if declared is not None and declared.name == "params":
        placed = u64(small.stride(), small.shape, large.stride(), large.shape) + f32(factors)
        arguments["params"] = padded(placed + bytes([align_corners]), declared.size)
    else:
        # In one dimension the host binds a second scale, which no kernel reads.
        arguments |= {
            "input_strides": padded(u64(small.stride()), 32),
            "output_strides": padded(u64(large.stride()), 32),
            "input_sizes": padded(i64(small.shape), 32),
            "output_sizes": padded(i64(large.shape), 32),
            "scales": padded(f32(factors), 8),
            "align_corners": bytes([align_corners]),
        }
    kernel.launch(arguments, math.prod(large.shape[2:]))


class Resize:
    """An operator that resizes: its kernel, how many dimensions, whether it is told to align corners."""

    def __init__(self, kernel: str, dimensions: int, *, aligns: bool) -> None:
        self.kernel, self.dimensions, self.aligns = kernel, dimensions, aligns
        scales = {1: ["scales"], 2: ["scales_h", "scales_w"], 3: ["scales_d", "scales_h", "scales_w"]}[dimensions]
        self.names = [*(["align_corners"] if aligns else []), *scales]

    def forward(self, release: Release, output: Tensor, given: Tensor, _size: Ints, *rest: Any, **named: Any) -> None:
        """Fill `output` from `given`."""
        kernel = self._kernel(release, self.kernel, given)
        if output.numel():
            align, scales = self._options(rest, named)
            _launch(kernel, {"inputData": given, "outputData": output}, align, scales)

    def backward(
        self, release: Release, result: Tensor, gradient: Tensor, _size: Ints, _from: Ints, *rest: Any, **named: Any
    ) -> None:
        """Fill `result`, the input's gradient, from that of the result: zeros, to which every place adds atomically."""
        kernel = self._kernel(release, f"{self.kernel}_backward", result)
        result.zero_()
        if gradient.numel():
            align, scales = self._options(rest, named)
            _launch(kernel, {"gradInputData": result, "gradOutputData": gradient}, align, scales)

    def _kernel(self, release: Release, name: str, like: Tensor) -> Kernel:
        whole = f"upsample_{name}_{metal(like.dtype)}"
        if whole not in release and f"upsample_{name}_float" not in release:
            raise NoRule("MPSGraph on this release")
        return release.kernel(whole)

    def _options(self, rest: tuple[Any, ...], named: dict[str, Any]) -> tuple[bool, Scales]:
        given = {**dict(zip(self.names, rest, strict=False)), **named}
        return bool(given.get("align_corners")), [given.get(name) for name in self.names if name != "align_corners"]


OPERATORS = {
    "upsample_nearest1d": Resize("nearest1d", 1, aligns=False),
    "upsample_nearest2d": Resize("nearest2d", 2, aligns=False),
    "upsample_nearest3d": Resize("nearest_3d", 3, aligns=False),
    "_upsample_nearest_exact1d": Resize("nearest_exact1d", 1, aligns=False),
    "_upsample_nearest_exact2d": Resize("nearest_exact2d", 2, aligns=False),
    "_upsample_nearest_exact3d": Resize("nearest_exact_3d", 3, aligns=False),
    "upsample_linear1d": Resize("linear1d", 1, aligns=True),
    "upsample_bilinear2d": Resize("bilinear2d", 2, aligns=True),
    "upsample_bicubic2d": Resize("bicubic2d", 2, aligns=True),
    "_upsample_bilinear2d_aa": Resize("bilinear2d_aa", 2, aligns=True),
    "_upsample_bicubic2d_aa": Resize("bicubic2d_aa", 2, aligns=True),
    "upsample_trilinear3d": Resize("trilinear", 3, aligns=True),
}

GRADIENTS = (
    "upsample_nearest3d",
    "_upsample_nearest_exact3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "upsample_trilinear3d",
)
"""Those whose gradient has kernels in a release up to 2.14.1; that of the others is MPSGraph in all."""

for operator, resize in OPERATORS.items():
    out_rule(operator, source=SOURCE)(resize.forward)
for operator in GRADIENTS:
    out_rule(f"{operator}_backward", source=SOURCE)(OPERATORS[operator].backward)
