"""Comparisons of two tensors, or of a tensor and a number: true or false."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.kernels.launch.pointwise import exec_binary
from hf_mps.kernels.launch.results import Operand, as_compared, common
from hf_mps.kernels.release import Release
from hf_mps.kernels.rules import out_rule


def _declare(name: str) -> None:
    @out_rule(f"{name}.Tensor", f"{name}.Scalar", source="operations/BinaryKernel.mm", outputs=as_compared)
    def launch(release: Release, output: Tensor, self: Operand, other: Operand) -> None:
        exec_binary(release, output, self, other, name, common=common(self, other), natural=torch.bool)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _declare(_name)
