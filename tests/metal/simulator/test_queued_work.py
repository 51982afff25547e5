"""Operators that wait in a queue until somebody waits for the device: the faults that come of it, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_mps.metal import simulator
from hf_mps.metal.simulator import strictness
from tests.metal.simulator.test_more_calls import CALLS

pytestmark = pytest.mark.usefixtures("mps", "bare")


@pytest.fixture
def queued() -> Iterator[None]:
    with strictness.on("queued-work", "late-copies"):
        yield


def test_it_is_on_only_where_a_program_asks_for_it() -> None:
    assert "queued-work" not in strictness.active()


def test_a_source_that_is_overwritten_after_its_use_is_used_as_overwritten(queued: None) -> None:
    buffer = torch.ones(3)
    found = buffer.to("mps", non_blocking=True) * 2
    buffer.fill_(7)
    assert found.tolist() == [14.0, 14.0, 14.0]
    buffer.fill_(1)
    found = buffer.to("mps", non_blocking=True) * 2
    torch.mps.synchronize()
    buffer.fill_(7)
    assert found.tolist() == [2.0, 2.0, 2.0], "a wait before the buffer is used again is the cure"


def test_a_time_without_a_wait_is_that_of_handing_over(queued: None) -> None:
    x = torch.randn(900, 900, device="mps")
    (x @ x).sum().item()
    start = perf_counter()
    for _ in range(4):
        x = x @ x
    handed_over = perf_counter() - start
    torch.mps.synchronize()
    assert handed_over < (perf_counter() - start) / 2


def test_what_goes_wrong_in_an_operator_is_raised_where_somebody_waits(queued: None) -> None:
    with strictness.off("silent-indices", "late-indices"):
        F.embedding(torch.tensor([9], device="mps"), torch.ones(3, 2, device="mps"))
        with pytest.raises(IndexError):
            torch.mps.synchronize()
        torch.mps.synchronize()


def test_a_call_that_is_wrong_in_itself_is_refused_at_once(queued: None) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3, device="mps") @ torch.ones(2, 3, device="mps")
    with pytest.raises(TypeError, match="float64"):
        torch.ones(2, device="mps").double()


def test_nothing_waits_but_what_waits(queued: None) -> None:
    with simulator.counted() as counts:
        x = torch.arange(6.0, device="mps").view(2, 3).t().add(1)
        x[0].mul_(2)
        x[1].fill_(3)
        y = torch.cat([x, x.clone()]).softmax(-1).max(1).values
        assert counts.waits == 0
        assert y.nonzero().shape == (6, 1)
        assert counts.waits == 1


def test_work_is_done_as_the_faults_were_when_it_came(queued: None) -> None:
    x = torch.ones(3, device="mps") + 1
    with strictness.off("queued-work"):
        assert (x * 2).tolist() == [4.0, 4.0, 4.0]
    assert torch.randn(5, device="mps").shape == (5,)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "overlapping out"])
def test_an_operator_has_the_same_result(name: str, queued: None) -> None:
    with strictness.off("queued-work"):
        expected = tree_leaves(CALLS[name]("mps"))
    for one, other in zip(tree_leaves(CALLS[name]("mps")), expected, strict=True):
        assert not isinstance(one, torch.Tensor) or one.dtype == other.dtype
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def trained() -> list[torch.Tensor]:
    torch.manual_seed(0)
    picture = (nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Dropout(0.2))
    model = nn.Sequential(*picture, nn.Linear(144, 16), nn.LayerNorm(16), nn.Linear(16, 3)).to("mps")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(4):
        rows, labels = torch.randn(5, 1, 8, 8), torch.randint(3, (5,))
        F.cross_entropy(model(rows.to("mps", non_blocking=True)), labels.to("mps", non_blocking=True)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def test_a_training_has_the_same_weights_to_the_last_bit(queued: None) -> None:
    with strictness.off("queued-work"):
        expected = trained()
    with simulator.counted() as counts:
        found = trained()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    copied = sum(1 for _ in found) * 2  # the weights, there and back; buffers besides
    assert counts.waits <= copied + 5, "four steps themselves never wait"
