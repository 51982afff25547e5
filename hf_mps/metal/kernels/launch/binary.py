"""Functions of two tensors, element by element; a number takes the place of one."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch import numbers
from hf_mps.metal.kernels.launch.pointwise import exec_binary
from hf_mps.metal.kernels.launch.results import Operand, as_common, as_common_float, as_compared, common, written
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule
from hf_mps.metal.kernels.runtime import NoRule

SOURCE = "operations/BinaryKernel.mm"

COMMON = {
    "mul.Tensor": "mul", "remainder.Tensor": "remainder", "fmod.Tensor": "fmod", "maximum": "maximum",
    "minimum": "minimum", "hypot": "hypot", "nextafter": "nextafter", "logaddexp": "logaddexp",
    "logaddexp2": "logaddexp2", "igamma": "igamma", "igammac": "igammac", "gcd": "gcd", "lcm": "lcm",
    "bitwise_and.Tensor": "bitwise_and", "bitwise_or.Tensor": "bitwise_or", "bitwise_xor.Tensor": "bitwise_xor",
    "bitwise_left_shift.Tensor": "bitwise_left_shift", "bitwise_right_shift.Tensor": "bitwise_right_shift",
}  # fmt: skip
"""Operators whose output has the dtype that both inputs are promoted to, and their kernels."""

FLOAT = {
    "div.Tensor": "div_true", "atan2": "atan2", "copysign.Tensor": "copysign", "xlogy.Tensor": "xlogy",
    "special_xlog1py": "xlog1py", "special_zeta": "zeta",
}  # fmt: skip
"""Operators whose output is of float where both inputs are of whole numbers, and their kernels."""

POLYNOMIALS = (
    "chebyshev_polynomial_t", "chebyshev_polynomial_u", "chebyshev_polynomial_v", "chebyshev_polynomial_w",
    "shifted_chebyshev_polynomial_t", "shifted_chebyshev_polynomial_u", "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w", "hermite_polynomial_h", "hermite_polynomial_he",
)  # fmt: skip
"""Kernels of the special_ operators of their names, of a tensor and a degree."""


def _as_complex(target: Tensor | None, real: Tensor, imag: Tensor) -> Tensor:
    if real.dtype != imag.dtype:
        raise NoRule("PyTorch refuses the arguments: two dtypes")
    dtype = {torch.float32: torch.complex64, torch.float16: torch.complex32}.get(real.dtype)
    if dtype is None:
        raise NoRule("no kernel for the dtype")
    return written(target, dtype, real, imag)


@out_rule("complex", source=SOURCE, outputs=_as_complex, kernel="make_complex")
@out_rule("polar", source=SOURCE, outputs=_as_complex, kernel="polar")
def launch(release: Release, output: Tensor, self: Operand, other: Operand, *, kernel: str) -> None:
    """The kernel of two operands."""
    exec_binary(release, output, self, other, kernel)


for _operator, _kernel in COMMON.items():
    out_rule(_operator, source=SOURCE, outputs=as_common, kernel=_kernel)(launch)
for _operator, _kernel in FLOAT.items():
    out_rule(_operator, source=SOURCE, outputs=as_common_float, kernel=_kernel)(launch)
for _name in POLYNOMIALS:
    out_rule(f"special_{_name}", source=SOURCE, outputs=as_common_float, kernel=_name)(launch)


def compare(release: Release, output: Tensor, self: Operand, other: Operand, *, kernel: str) -> None:
    """True or false for two tensors, or for a tensor and a number."""
    exec_binary(release, output, self, other, kernel, common=common(self, other), natural=torch.bool)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    out_rule(f"{_name}.Tensor", f"{_name}.Scalar", source=SOURCE, outputs=as_compared, kernel=_name)(compare)


@out_rule("fmax", source=SOURCE, outputs=as_common, kernel="fmax", whole="maximum")
@out_rule("fmin", source=SOURCE, outputs=as_common, kernel="fmin", whole="minimum")
def extreme(release: Release, output: Tensor, self: Tensor, other: Tensor, *, kernel: str, whole: str) -> None:
    """The larger or smaller, and of a NaN the other; whole numbers have none."""
    exec_binary(release, output, self, other, kernel if common(self, other).is_floating_point else whole)


def _as_divided(target: Tensor | None, self: Operand, other: Operand, *, rounding_mode: str | None = None) -> Tensor:
    return (as_common_float if rounding_mode is None else as_common)(target, self, other)


@out_rule("div.Tensor_mode", source=SOURCE, outputs=_as_divided)
def divide_rounding(
    release: Release, output: Tensor, self: Operand, other: Operand, *, rounding_mode: str | None = None
) -> None:
    """The quotient, rounded down or towards zero where asked."""
    kernels = {None: "div_true", "floor": "div_floor", "trunc": "div_trunc"}
    if rounding_mode not in kernels:
        raise NoRule("PyTorch refuses the arguments: another rounding mode")
    exec_binary(release, output, self, other, kernels[rounding_mode])


@out_rule("add.Tensor", source="operations/BinaryOps.mm", outputs=as_common)
def add(release: Release, output: Tensor, self: Operand, other: Operand, *, alpha: complex = 1) -> None:
    """self + alpha * other."""
    _add_or_subtract(release, output, self, other, alpha, "add")


@out_rule("sub.Tensor", source="operations/BinaryOps.mm", outputs=as_common)
def subtract(release: Release, output: Tensor, self: Operand, other: Operand, *, alpha: complex = 1) -> None:
    """self - alpha * other."""
    if any(each.dtype == torch.bool if isinstance(each, Tensor) else isinstance(each, bool) for each in (self, other)):
        raise NoRule("PyTorch refuses the arguments: subtraction of bool")
    _add_or_subtract(release, output, self, other, alpha, "sub")


def _add_or_subtract(
    release: Release, output: Tensor, self: Operand, other: Operand, alpha: complex, name: str
) -> None:
    """Without a product where alpha is 1, and a copy where it is 0 (add_sub_lerp_template)."""
    if alpha == 1:
        exec_binary(release, output, self, other, name)
        return
    dtype = common(self, other)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole and not (isinstance(alpha, int) and dtype != torch.bool):
        raise NoRule("PyTorch refuses the arguments: alpha of another kind than the tensors")
    if alpha == 0:
        output.copy_(self) if isinstance(self, Tensor) else output.fill_(self)
        return
    # A kernel that casts computes in the output's dtype, its alpha too.
    beside = numbers.alpha(alpha, output.dtype)
    exec_binary(release, output, self, other, f"{name}_alpha", beside=beside)
