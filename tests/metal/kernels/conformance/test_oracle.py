"""What is right, what counts as agreement, and how large an error is."""

from __future__ import annotations

import math

import pytest
import torch

from scripts.conformance import oracle
from scripts.conformance.calls import Call
from scripts.conformance.oracle import Wanted


def against(found: torch.Tensor, right: torch.Tensor, own: torch.Tensor | None = None) -> oracle.Verdict:
    return oracle.verdict([found], Wanted([right], None if own is None else [own], 1.0), random=False)


def test_a_call_is_computed_in_float64_whatever_its_dtype() -> None:
    given = torch.rand(100).half()
    wanted = oracle.wanted(Call("exp", (given,), {}, ""))
    assert torch.equal(wanted.right[0], given.double().exp())
    assert torch.equal(wanted.own[0], given.exp())


def test_a_scale_stays_float32_where_pytorch_asks_for_it() -> None:
    gradients = [torch.full((3,), 4.0).half()]
    call = Call(
        "_amp_foreach_non_finite_check_and_unscale_", (gradients, torch.zeros(()), torch.tensor(0.5)), {}, "by schema"
    )
    wanted = oracle.wanted(call)
    assert wanted.right[0].dtype == torch.float64
    assert wanted.right[0].tolist() == [2.0, 2.0, 2.0]


def test_the_layout_of_memory_changes_nothing_that_is_right() -> None:
    given = torch.randn(1, 6, 3)
    statistics = [torch.zeros(1, 2), torch.ones(1, 2)]
    sizes = (torch.rand(6), 1, 6, 3, 2, [True, True, True])
    transposed = given.mT.contiguous().mT
    wanted, dense = (
        oracle.wanted(Call("native_group_norm_backward", (each, each, *statistics, *sizes), {}, ""))
        for each in (transposed, given)
    )
    for one, other in zip(wanted.right, dense.right, strict=True):
        assert torch.equal(one, other)  # type: ignore[arg-type]


def test_what_pytorch_refuses_is_no_case() -> None:
    assert oracle.wanted(Call("mul.Tensor", (torch.rand(3), torch.rand(4)), {}, "")) is None


@pytest.mark.parametrize(
    ("dtype", "value", "unit"),
    [
        (torch.float32, 1.0, 2**-23),
        (torch.float16, 1.0, 2**-10),
        (torch.bfloat16, 1.0, 2**-7),
        (torch.float32, 0.0, 2**-149),
    ],
)
def test_errors_are_in_units_in_the_last_place(dtype: torch.dtype, value: float, unit: float) -> None:
    right = torch.tensor([value], dtype=torch.float64)
    assert against((right + 3 * unit).to(dtype), right).error == pytest.approx(3.0)


def test_infinities_and_nans_agree_with_themselves_alone() -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert against(values, values.double()).agrees
    for place in range(4):
        wrong = values.clone()
        wrong[place] = 0.5
        assert not against(wrong, values.double()).agrees


def test_an_error_is_allowed_beside_the_cpus_own() -> None:
    right = torch.tensor([1.0], dtype=torch.float64)
    found, own = torch.tensor([1.0001]), torch.tensor([1.00005])
    assert not against(found, right).agrees
    assert against(found, right, own).agrees


def test_integers_agree_exactly() -> None:
    assert against(torch.tensor([1, 2]), torch.tensor([1, 2])).agrees
    assert (
        against(torch.tensor([1, 2]), torch.tensor([1, 3])).detail == "result 0: 1 of 2 differ: element 1 is 2, not 3"
    )


def test_draws_are_compared_as_distributions() -> None:
    one, other = torch.rand(10_000), torch.rand(10_000)
    assert oracle.verdict([one], Wanted([other], None, 1.0), random=True).agrees
    assert not oracle.verdict([one * 0.9], Wanted([other], None, 1.0), random=True).agrees
