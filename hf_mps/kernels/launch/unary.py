"""Functions of one tensor, element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hf_mps.kernels.launch.pointwise import exec_unary
from hf_mps.kernels.launch.results import as_float, as_input
from hf_mps.kernels.rules import out_rule
from hf_mps.kernels.runtime import NoRule

if TYPE_CHECKING:
    from hf_mps.kernels.release import Release

SOURCE = "operations/UnaryKernel.mm"

SAME = {"neg": "neg", "bitwise_not": "bitwise_not", "relu": "relu"}
"""Operators whose output has the input's dtype, and their kernels."""

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


def _declare(operator: str, kernel: str, outputs: object) -> None:
    @out_rule(operator, source=SOURCE, outputs=outputs)  # type: ignore[arg-type]
    def launch(release: Release, output: Tensor, self: Tensor) -> None:
        exec_unary(release, output, self, kernel)


for _operator, _kernel in SAME.items():
    _declare(_operator, _kernel, as_input)
for _name in FLOAT:
    _declare(_name, _name, as_float)
for _name in SPECIAL:
    _declare(f"special_{_name}", _name, as_float)
for _name in BESSEL:
    _declare(f"special_{_name}", f"{_name}_forward", as_float)


@out_rule("abs", source=SOURCE, outputs=as_input)
def absolute(release: Release, output: Tensor, self: Tensor) -> None:
    """The magnitude; of complex numbers the host takes the real part of a complex result."""
    if self.is_complex():
        raise NoRule("complex numbers")
    exec_unary(release, output, self, "abs")
