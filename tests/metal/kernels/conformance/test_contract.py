"""What no operator promises is not compared: factors that do not exist, the choice among equals, private buffers."""

from __future__ import annotations

import pytest
import torch

from scripts.conformance import contract, oracle
from scripts.conformance.calls import Call

EQUALS = torch.tensor([3.0, 1.0, 3.0, 2.0])


def agrees(call: Call, found: list[torch.Tensor | None]) -> bool:
    wanted = oracle.wanted(call)
    assert wanted is not None
    return oracle.verdict(found, wanted, random=False).agrees


@pytest.mark.parametrize(
    ("indices", "right"),
    [([0, 2], True), ([2, 0], True), ([0, 0], False), ([0, 3], False)],
    ids=["in order", "another order", "one element twice", "another value"],
)
def test_equal_values_come_in_any_order(indices: list[int], right: bool) -> None:
    call = Call("topk", (EQUALS, 2), {}, "")
    assert agrees(call, [torch.tensor([3.0, 3.0]), torch.tensor(indices)]) == right


def test_a_stable_order_is_compared() -> None:
    values, indices = EQUALS.sort(stable=True)
    swapped = torch.tensor([1, 3, 2, 0])
    for stable in (False, True):
        call = Call("sort.stable", (EQUALS,), {"stable": stable, "dim": 0}, "")
        assert agrees(call, [values, indices])
        assert agrees(call, [values, swapped]) != stable


def test_max_promises_the_first() -> None:
    call = Call("max.dim", (EQUALS, 0), {}, "")
    assert agrees(call, [torch.tensor(3.0), torch.tensor(0)])
    assert not agrees(call, [torch.tensor(3.0), torch.tensor(2)])


def test_a_factor_that_does_not_exist_is_not_compared_and_its_report_is() -> None:
    matrices = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, -1.0, 1.0]))])
    call = Call("linalg_cholesky_ex", (matrices,), {}, "")
    junk = torch.stack([torch.eye(3), torch.full((3, 3), 9.0)])
    assert agrees(call, [junk, torch.tensor([0, 2], dtype=torch.int32)])
    assert not agrees(call, [junk, torch.tensor([0, 1], dtype=torch.int32)])
    assert not agrees(call, [junk.flip(0), torch.tensor([0, 2], dtype=torch.int32)])


def test_what_an_operator_keeps_for_its_gradient_is_its_own_affair() -> None:
    assert [contract.private("log_sigmoid_forward", place) for place in range(2)] == [False, True]
    assert [contract.private("_embedding_bag", place) for place in range(4)] == [False, True, True, True]
    assert agrees(Call("log_sigmoid_forward", (EQUALS,), {}, ""), [EQUALS.sigmoid().log(), torch.empty(0)])
