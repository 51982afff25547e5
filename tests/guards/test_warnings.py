"""Hazards that nothing can cure from outside are told of, or refused, before they do harm."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_mps import guards
from hf_mps.errors import UserError
from hf_mps.guards import GuardNotice
from hf_mps.guards.huge_embedding import LIMIT
from hf_mps.simulator import hazards
from tests.guards import lightning_loops, loops

TALL, WIDE = LIMIT // 1024 + 1, 1024


def huge() -> nn.Parameter:
    """A parameter of more than 2^31 elements that takes 4 KB: its rows are one row."""
    return nn.Parameter(torch.ones(1, WIDE, device="mps").expand(TALL, WIDE))


def test_rows_beyond_two_to_the_31_are_zeros_with_the_hazard() -> None:
    with hazards.on("huge-embedding"):
        found = nn.functional.embedding(torch.tensor([0, TALL - 1], device="mps"), huge())
    assert found.sum(1).tolist() == [WIDE, 0]


def test_a_parameter_that_large_is_refused_before_it_is_trained() -> None:
    with pytest.raises(UserError, match=re.escape(f"[{TALL}, {WIDE}] has 2,147,484,672 elements")):
        torch.optim.SGD([huge()])
    with guards.suspended("huge-embedding"):
        torch.optim.SGD([huge()])


def test_it_is_refused_in_an_accelerate_loop_too() -> None:
    model = nn.Module()
    model.weight = huge()
    with pytest.raises(UserError, match="pytorch#188756"):
        loops.new_accelerator().prepare_model(model)


class Frozen(nn.Module):
    """A huge table that is not trained, and a layer that is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = huge().requires_grad_(False)
        self.layer = nn.Linear(1, 1)


def test_one_that_is_frozen_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"[{TALL}, {WIDE}] has")):
        loops.new_accelerator().prepare_model(Frozen())
    pl = lightning_loops.library()
    with pytest.raises(UserError, match=re.escape(f"[{TALL}, {WIDE}] has")):
        lightning_loops.trainer(pl, tmp_path, max_steps=1).fit(lightning_loops.module(pl, Frozen()))


def long_batches(rows: list[int], length: int = 8) -> list[dict[str, Any]]:
    return [{"input_ids": torch.ones(count, length, dtype=torch.long)} for count in rows]


def gradient(rows: int, length: int = 8) -> float:
    """The gradient of a linear layer over that many tokens, a mean that does not depend on their number."""
    layer = nn.Linear(2, 2, device="mps")
    layer(torch.ones(rows, length, 2, device="mps")).mean().backward()
    assert layer.weight.grad is not None
    return float(layer.weight.grad[0, 0])


def test_a_large_batch_after_another_shape_has_gradients_far_too_large_with_the_hazard() -> None:
    with hazards.on("large-batch-grad"):
        assert gradient(4097) == pytest.approx(0.5, rel=1e-3)
        assert gradient(8) == pytest.approx(0.5, rel=1e-3)
        assert gradient(4097) == pytest.approx(500, rel=1e-3)


def test_such_a_batch_is_warned_of_in_an_accelerate_loop() -> None:
    accelerator = loops.new_accelerator()
    loader = accelerator.prepare(torch.utils.data.DataLoader(long_batches([4, 4097]), batch_size=None))
    with pytest.warns(GuardNotice, match="a batch of 4097 x 8 tokens after other shapes: .*a batch size of 4096"):
        assert len(list(loader)) == 2


def test_large_batches_of_one_shape_are_not() -> None:
    loader = loops.new_accelerator().prepare(torch.utils.data.DataLoader(long_batches([4097, 4097]), batch_size=None))
    assert len(list(loader)) == 2
    assert not guards.acted()


def test_such_a_batch_is_warned_of_in_a_trainer(tmp_path: Path) -> None:
    long = loops.rows()[:8]
    for row in long:
        row["input_ids"] = row["input_ids"][:1] * 16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_mps.guards.large_batch_grad.TOKENS", 100)
        run = loops.trainer(tmp_path, data=loops.rows()[:8] + long)
        patch.setattr(run, "_get_train_sampler", lambda *_: torch.utils.data.SequentialSampler(run.train_dataset))
        with pytest.warns(GuardNotice, match="a batch of 8 x 16 tokens"):
            run.train()
