"""Functions of one tensor, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.numbers import Alpha, alpha, params
from hf_mps.metal.kernels.launch.pointwise import exec_unary
from hf_mps.metal.kernels.launch.results import as_float, as_input, as_truth, written
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule
from hf_mps.metal.kernels.runtime import NoRule

SOURCE = "operations/UnaryKernel.mm"

SAME = ("neg", "bitwise_not", "round")
"""Operators whose output has the input's dtype; their kernels have the same names."""

FLOAT = (
    "acos", "asin", "atan", "cos", "cosh", "digamma", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "i0", "lgamma",
    "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sigmoid", "sin", "sinc", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""Operators whose output is of float where the input is of whole numbers; their kernels have the same names."""

SPECIAL = ("entr", "erfcx", "i0e", "i1", "i1e", "spherical_bessel_j0")
BESSEL = (
    "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1", "modified_bessel_i0", "modified_bessel_i1",
    "modified_bessel_k0", "modified_bessel_k1", "scaled_modified_bessel_k0", "scaled_modified_bessel_k1",
)  # fmt: skip


def launch(release: Release, output: Tensor, self: Tensor, *, kernel: str) -> None:
    """The kernel of one operand."""
    exec_unary(release, output, self, kernel)


for _name in SAME:
    out_rule(_name, source=SOURCE, outputs=as_input, kernel=_name)(launch)
for _name in FLOAT:
    out_rule(_name, source=SOURCE, outputs=as_float, kernel=_name)(launch)
for _name in SPECIAL:
    out_rule(f"special_{_name}", source=SOURCE, outputs=as_float, kernel=_name)(launch)
for _name in BESSEL:
    out_rule(f"special_{_name}", source=SOURCE, outputs=as_float, kernel=f"{_name}_forward")(launch)


out_rule("logical_not", source=SOURCE, outputs=as_truth, kernel="logical_not")(launch)


@out_rule("abs", source=SOURCE, outputs=as_input, kernel="abs")
@out_rule("angle", source=SOURCE, outputs=as_float, kernel="angle")
def of_real(release: Release, output: Tensor, self: Tensor, *, kernel: str) -> None:
    """Of real numbers alone."""
    if self.is_complex():
        raise NoRule("complex numbers: the host takes the real part of a complex result")
    exec_unary(release, output, self, kernel)


@out_rule("round.decimals", source=SOURCE, outputs=as_input)
def round_decimals(release: Release, output: Tensor, self: Tensor, *, decimals: int) -> None:
    """Rounded to decimals; to none is `round`."""
    if decimals == 0:
        exec_unary(release, output, self, "round")
    else:
        exec_unary(release, output, self, "round_decimals", alpha(decimals, torch.int64))


def _as_power(target: Tensor | None, self: Tensor, exponent: complex) -> Tensor:
    return written(target, torch.result_type(self, exponent), self, exact=True)


@out_rule("pow.Tensor_Scalar", source=SOURCE, outputs=_as_power)
def power(release: Release, output: Tensor, self: Tensor, exponent: complex) -> None:
    """A power; squares, roots and reciprocals have kernels of their own."""
    dtype = torch.result_type(self, exponent)
    whole = not (dtype.is_floating_point or dtype.is_complex)
    if whole and isinstance(exponent, int | float) and exponent < 0:
        raise NoRule("PyTorch refuses the arguments: a whole number to a negative power")
    if exponent == 0:
        output.fill_(1)
        return
    if exponent == 1:
        output.copy_(self)
        return
    base = self if self.dtype == dtype else self.to(dtype)
    name, beside = _power_kernel(exponent, whole=whole)
    exec_unary(release, output, base, name, beside)


def _power_kernel(exponent: complex, *, whole: bool) -> tuple[str, Alpha | None]:
    if not isinstance(exponent, int | float):
        return "pow_scalar", alpha(exponent, torch.complex64)
    if exponent == 2:
        return "sqr", None
    if whole:
        return "pow_scalar", alpha(exponent, torch.int32)
    special = {-1.0: "reciprocal", -0.5: "rsqrt", 0.5: "sqrt"}.get(exponent)
    return (special, None) if special else ("pow_scalar", alpha(exponent, torch.float32))


@out_rule("polygamma", source="operations/Gamma.mm", outputs=lambda target, _, self: as_float(target, self))
def polygamma(release: Release, output: Tensor, n: int, self: Tensor) -> None:
    """The n-th derivative of digamma."""
    if n < 0:
        raise NoRule("PyTorch refuses the arguments: a negative order")
    if n < 2:
        exec_unary(release, output, self, ("digamma", "trigamma")[n])
    else:
        exec_unary(release, output, self, "polygamma", alpha(n, torch.int32))


@out_rule("nan_to_num", source=SOURCE, outputs=as_input)
def nan_to_num(
    release: Release,
    output: Tensor,
    self: Tensor,
    nan: float | None = None,
    posinf: float | None = None,
    neginf: float | None = None,
) -> None:
    """What is no number, and infinities, replaced; from 2.14 on."""
    if not (self.is_floating_point() or self.is_complex()):
        output.copy_(self)
        return
    limits = torch.finfo(self.dtype)
    values = (nan or 0.0, limits.max if posinf is None else posinf, limits.min if neginf is None else neginf)
    exec_unary(release, output, self, "nan_to_num", params("NanToNumParams", torch.float32, *values))
