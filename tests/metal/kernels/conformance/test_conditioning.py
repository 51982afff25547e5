"""An error that a last place of the arguments explains is none; a step that was missed, or a wrong sign, is one."""

from __future__ import annotations

import pytest
import torch

from scripts.conformance import oracle
from scripts.conformance.calls import Call

FAR = torch.tensor([1000.0, 1.0]).bfloat16()
NEAR = torch.tensor([996.0, 1.0]).bfloat16()


def verdict(call: Call, found: torch.Tensor) -> oracle.Verdict:
    wanted = oracle.wanted(call)
    assert wanted is not None
    return oracle.verdict([found], wanted, random=False)


@pytest.mark.parametrize(
    ("found", "agrees"),
    [([4.0, 0.0], True), ([8.0, 0.0], True), ([4.0, 0.5], False), ([500.0, 0.0], False)],
    ids=["exact", "a last place of 1,000", "far beside 1", "far beside 1,000"],
)
def test_a_difference_of_near_numbers_may_be_off_by_their_last_place(found: list[float], agrees: bool) -> None:
    one = verdict(Call("sub.Tensor", (FAR, NEAR), {}, ""), torch.tensor(found).bfloat16())
    assert one.agrees == agrees


def test_what_agrees_only_so_says_it() -> None:
    call = Call("sub.Tensor", (FAR, NEAR), {}, "")
    assert not verdict(call, torch.tensor([4.0, 0.0]).bfloat16()).conditioned
    assert verdict(call, torch.tensor([8.0, 0.0]).bfloat16()).conditioned


def test_numbers_that_are_no_tensors_have_a_last_place_too() -> None:
    start, end = torch.zeros(1).bfloat16(), torch.full((1,), 100.0).bfloat16()
    rounded = 0.4 * (1 + 2**-7)
    assert verdict(Call("lerp.Scalar", (start, end, 0.4), {}, ""), torch.tensor([100 * rounded]).bfloat16()).agrees


def test_the_wrong_side_of_a_step_is_a_difference() -> None:
    call = Call("floor", (torch.tensor([3.0]),), {}, "")
    assert verdict(call, torch.tensor([3.0])).agrees
    assert not verdict(call, torch.tensor([2.0])).agrees


def test_a_value_beyond_the_range_of_the_dtype_may_be_no_number() -> None:
    row = torch.tensor([300.0, 300.0, 300.0, 0.001]).half()
    call = Call("cumprod", (row, 0), {}, "")
    own = row.cumprod(0)
    assert verdict(call, own).agrees
    assert not verdict(call, torch.tensor([300.0, 0.0, 0.0, 0.0]).half()).agrees
