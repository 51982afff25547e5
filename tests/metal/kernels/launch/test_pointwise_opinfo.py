"""Samples of pointwise operators agree with the CPU in the dtypes that tests/metal/kernels/test_opinfo.py does not
take."""

from __future__ import annotations

import pytest
import torch

from hf_mps.metal.kernels import launch
from hf_mps.metal.kernels.rules import RULES, Dispatch
from scripts.conformance.opinfo import operators
from tests.metal.kernels.launch.samples import compared

pytestmark = pytest.mark.slow

FAMILIES = {"unary", "binary", "activations", "comparison", "ternary", "gates"}
# Each ninth of an operator's samples is taken.
EVERY = {torch.int64: 9, torch.bool: 9, torch.complex64: 9}
# Operators that a rule runs on a later release; this one computes them with MPSGraph.
LATER = {"logical_not", "nan_to_num", "nn.functional.glu", "nn.functional.logsigmoid", "nn.functional.mish"}
# It computes in float64, which a Mac refuses.
NOT_ON_METAL = {"float_power"}


def _operators() -> list[str]:
    launch.load()
    names = {rule.operator.partition(".")[0] for rule in RULES.values() if rule.family in FAMILIES}
    found = {each.name for each in operators() if each.aten_name in names or each.name.replace(".", "_") in names}
    return sorted(found - NOT_ON_METAL)


@pytest.mark.rotated
@pytest.mark.parametrize("operator", _operators())
def test_samples_agree(kernels: Dispatch, operator: str) -> None:
    ran, taken, differ = 0, 0, []
    for dtype, every in EVERY.items():
        # Of whole numbers come floats, of many operators.
        tolerance = None if dtype.is_floating_point or dtype.is_complex else 1e-4
        samples = compared(kernels, operator, dtype, tolerance=tolerance, every=every)
        ran, taken = ran + samples.ran, taken + samples.taken
        differ += samples.differ
    assert differ == []
    assert ran or not taken or operator in LATER
