"""PyTorch's own samples of each pointwise operator with a rule: results and gradients of the release's kernels.

The oracle is the CPU in float64, or where that differs the CPU's result for the same dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from hf_mps.kernels import launch
from hf_mps.kernels.rules import RULES, Dispatch

pytestmark = pytest.mark.slow

FAMILIES = {"unary", "binary", "activations", "comparison", "ternary"}
SAMPLES = {torch.float32: 4, torch.float16: 2, torch.bfloat16: 2, torch.int64: 2, torch.bool: 1, torch.complex64: 1}
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Operators that a rule runs on a later release; this one computes them with MPSGraph.
LATER = {"mish", "nan_to_num", "logical_not"}
# float64 is part of what they do, and a Mac refuses it.
NOT_ON_METAL = {"float_power"}


def _operators() -> list[Any]:
    launch.load()
    names = {rule.operator.partition(".")[0] for rule in RULES.values() if rule.family in FAMILIES} - NOT_ON_METAL
    return [each for each in op_db if (each.aten_name in names or each.name.replace(".", "_") in names)]


@pytest.mark.parametrize("operator", _operators(), ids=lambda each: f"{each.name}{each.variant_test_name}")
def test_samples_agree(kernels: Dispatch, operator: Any) -> None:
    ran = 0
    for dtype, count in SAMPLES.items():
        if dtype not in operator.dtypes:
            continue
        for sample in list(operator.sample_inputs("cpu", dtype, requires_grad=_differs(operator, dtype)))[:count]:
            kernels.ledger.clear()
            given = (sample.input, list(sample.args), sample.kwargs)
            found = _values(operator, tree_map_only(Tensor, lambda each: _to(each, "mps"), given))
            ran += sum(kernels.ledger.operators.values()) > 0
            _check(found, _values(operator, given), _doubled(operator, given, dtype), TOLERANCE.get(dtype, 2e-5))
    assert ran or operator.name in LATER


def _differs(operator: Any, dtype: torch.dtype) -> bool:
    # The Bessel functions of the CPU have no gradient in half.
    return bool(operator.supports_autograd and dtype == torch.float32)


def _values(operator: Callable[..., Any], given: tuple[Any, list[Any], dict[str, Any]]) -> list[Tensor]:
    """Results, then gradients of their sum by each input that has one."""
    results = tree_leaves(operator(given[0], *given[1], **given[2]))
    differing = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.requires_grad]
    heads = [each.abs().sum() if each.is_complex() else each.sum() for each in results if each.requires_grad]
    found = torch.autograd.grad(heads, differing, allow_unused=True) if heads else ()
    return [*results, *(each for each in found if each is not None)]


def _doubled(operator: Any, given: Any, dtype: torch.dtype) -> list[Tensor]:
    if not dtype.is_floating_point:
        return _values(operator, given)
    return _values(operator, tree_map_only(Tensor, lambda each: _to(each, _wide(each.dtype)), given))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _to(tensor: Tensor, target: Any) -> Tensor:
    return tensor.detach().to(target).requires_grad_(tensor.requires_grad)


def _check(found: list[Tensor], cpus: list[Tensor], doubled: list[Tensor], tolerance: float) -> None:
    for mine, cpu, exact in zip(found, cpus, doubled, strict=True):
        assert (mine.dtype, mine.shape) == (cpu.dtype, cpu.shape)
        here = mine.detach().cpu().to(exact.dtype)
        good = _close(here, exact.detach(), tolerance) | _close(here, cpu.detach().to(exact.dtype), tolerance)
        assert good.all(), f"{here[~good][:3]} for {exact[~good][:3]}"


def _close(found: Tensor, wanted: Tensor, tolerance: float) -> Tensor:
    return torch.isclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
