"""Functions of three operands, element by element: clamp and lerp."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import walk
from hf_mps.metal.kernels.launch.numbers import alpha, params
from hf_mps.metal.kernels.launch.pointwise import exec_binary, exec_ternary, exec_unary
from hf_mps.metal.kernels.launch.results import Operand, as_common, common, written
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i64, u32

COMPARE = "operations/TensorCompare.mm"
LERP = "operations/BinaryKernel.mm"


def _clamped_dtype(self: Tensor, *bounds: float | None) -> torch.dtype:
    found = self.dtype
    for bound in bounds:
        if bound is not None:
            dtype = torch.result_type(self, bound)
            found = dtype if found == self.dtype else torch.promote_types(found, dtype)
    return found


def _as_clamped(target: Tensor | None, self: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    return written(target, _clamped_dtype(self, min, max), self, exact=True)


@out_rule("clamp", source=COMPARE, outputs=_as_clamped)
def clamp(release: Release, output: Tensor, self: Tensor, min: float | None = None, max: float | None = None) -> None:
    """Between two numbers, or on one side of one."""
    if min is None and max is None:
        raise NoRule("PyTorch refuses the arguments: no bound")
    dtype = _clamped_dtype(self, min, max)
    given = self if self.dtype == dtype else self.to(dtype)
    if any(each is not None and math.isnan(each) for each in (min, max)):
        output.fill_(math.nan)
    elif min is not None and max is not None:
        exec_unary(release, output, given, "clamp_scalar", params("ClampScalarParams", dtype, min, max))
    elif min is not None:
        exec_unary(release, output, given, "clamp_min_scalar", alpha(min, dtype))
    elif max is not None:
        exec_unary(release, output, given, "clamp_max_scalar", alpha(max, dtype))


@out_rule("clamp_min", source=COMPARE, outputs=lambda target, self, min: _as_clamped(target, self, min))
def clamp_min(release: Release, output: Tensor, self: Tensor, min: float) -> None:
    """Not below a number."""
    clamp(release, output, self, min=min)


@out_rule("clamp_max", source=COMPARE, outputs=lambda target, self, max: _as_clamped(target, self, max=max))
def clamp_max(release: Release, output: Tensor, self: Tensor, max: float) -> None:
    """Not above a number."""
    clamp(release, output, self, max=max)


def _as_clamped_by(target: Tensor | None, self: Tensor, min: Tensor | None = None, max: Tensor | None = None) -> Tensor:
    bounds = [each for each in (min, max) if each is not None]
    if not bounds:
        raise NoRule("PyTorch refuses the arguments: no bound")
    if len(bounds) == 1:
        return as_common(target, self, bounds[0])
    if any(each.dtype != self.dtype and each.dim() != self.dim() for each in bounds):
        raise NoRule("three dtypes in tensors with dimensions and without")
    dtype = torch.promote_types(common(self, bounds[0]), common(self, bounds[1]))
    return written(target, dtype, self, *bounds)


@out_rule("clamp.Tensor", source=COMPARE, outputs=_as_clamped_by)
def clamp_by_tensors(
    release: Release, output: Tensor, self: Tensor, min: Tensor | None = None, max: Tensor | None = None
) -> None:
    """Between the elements of two tensors, or on one side of one's."""
    if min is not None and max is not None:
        exec_ternary(release, output, self, min, max, "clamp")
    elif min is not None:
        exec_binary(release, output, self, min, "maximum")
    elif max is not None:
        exec_binary(release, output, self, max, "minimum")


@out_rule("clamp_min.Tensor", source=COMPARE, outputs=as_common, kernel="maximum")
@out_rule("clamp_max.Tensor", source=COMPARE, outputs=as_common, kernel="minimum")
def clamp_by_tensor(release: Release, output: Tensor, self: Tensor, bound: Operand, *, kernel: str) -> None:
    """Not below, or not above, a tensor's elements."""
    exec_binary(release, output, self, bound, kernel)


def _as_lerped(target: Tensor | None, self: Tensor, end: Tensor, weight: Tensor | complex) -> Tensor:
    if self.dtype != end.dtype:
        raise NoRule("PyTorch refuses the arguments: two dtypes")
    inputs = (self, end, weight) if isinstance(weight, Tensor) else (self, end)
    return written(target, self.dtype, *inputs, exact=True)


@out_rule("lerp.Scalar", source=LERP, outputs=_as_lerped)
def lerp(release: Release, output: Tensor, self: Tensor, end: Tensor, weight: complex) -> None:
    """self + weight * (end - self)."""
    exec_binary(release, output, self, end, "lerp_alpha", beside=alpha(weight, self.dtype))


@out_rule("lerp.Tensor", source=LERP, outputs=_as_lerped)
def lerp_by_tensor(release: Release, output: Tensor, self: Tensor, end: Tensor, weight: Tensor | complex) -> None:
    """The same with a weight for each element, or one weight."""
    if not isinstance(weight, Tensor) or weight.dtype != self.dtype or not weight.is_mps:
        raise NoRule("a weight of another dtype or device")
    if output.numel() == 0:
        return
    name = metal(output.dtype)
    way = walk(output, self, end, weight)
    operands = [output, self, end, weight]
    if way.contiguous:
        release.kernel(f"lerp_tensor_dense_{name}").launch(operands, output.numel())
        return
    if weight.numel() == 1 and walk(output, self, end).contiguous:
        release.kernel(f"lerp_tensor_scalar_weight_{name}").launch(operands, output.numel())
        return
    steps = [i64(each) for each in way.strides]
    if len(way.shape) in (2, 3):
        kernel = release.kernel(f"lerp_tensor_strided_{len(way.shape)}d_{name}")
        inner, *outer = way.shape
        kernel.launch(
            [*operands, *steps], (inner, outer[0], outer[1] if len(outer) == 2 else 1), (min(inner, 1024), 1, 1)
        )
        return
    kernel = release.kernel(f"lerp_tensor_strided_{name}")
    kernel.launch([*operands, i64(way.shape), *steps, u32(len(way.shape))], output.numel())
