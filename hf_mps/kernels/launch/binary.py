"""Functions of two tensors, element by element; a number takes the place of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from hf_mps.kernels.launch.pointwise import alpha as beside
from hf_mps.kernels.launch.pointwise import exec_binary
from hf_mps.kernels.launch.results import Operand, as_common, as_common_float, common
from hf_mps.kernels.rules import out_rule

if TYPE_CHECKING:
    from hf_mps.kernels.release import Release

SOURCE = "operations/BinaryKernel.mm"


@out_rule("mul.Tensor", source=SOURCE, outputs=as_common)
def multiply(release: Release, output: Tensor, self: Operand, other: Operand) -> None:
    """The product."""
    exec_binary(release, output, self, other, "mul")


@out_rule("div.Tensor", source=SOURCE, outputs=as_common_float)
def divide(release: Release, output: Tensor, self: Operand, other: Operand) -> None:
    """The quotient."""
    exec_binary(release, output, self, other, "div_true")


@out_rule("add.Tensor", source="operations/BinaryOps.mm", outputs=as_common)
def add(release: Release, output: Tensor, self: Operand, other: Operand, *, alpha: complex = 1) -> None:
    """self + alpha * other."""
    _add_or_subtract(release, output, self, other, alpha, "add")


@out_rule("sub.Tensor", source="operations/BinaryOps.mm", outputs=as_common)
def subtract(release: Release, output: Tensor, self: Operand, other: Operand, *, alpha: complex = 1) -> None:
    """self - alpha * other."""
    _add_or_subtract(release, output, self, other, alpha, "sub")


def _add_or_subtract(
    release: Release, output: Tensor, self: Operand, other: Operand, alpha: complex, name: str
) -> None:
    if alpha == 1:
        exec_binary(release, output, self, other, name)
    else:
        dtype = common(self, other)
        exec_binary(release, output, self, other, f"{name}_alpha", beside=beside(alpha, dtype))
