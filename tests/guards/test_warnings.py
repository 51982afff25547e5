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
from tests.guards import lightning_loops, loops
from tests.guards.experiments import results
from tests.guards.experiments.results import TALL, WIDE


def test_a_parameter_that_large_is_refused_before_it_is_trained() -> None:
    with pytest.raises(UserError, match=re.escape(f"[{TALL}, {WIDE}] has 2,147,484,672 elements")):
        torch.optim.SGD([results.huge()])


def test_it_is_refused_in_an_accelerate_loop_too() -> None:
    model = nn.Module()
    model.weight = results.huge()
    with pytest.raises(UserError, match="pytorch#188756"):
        loops.new_accelerator().prepare_model(model)


def test_one_that_is_frozen_is_refused_too() -> None:
    with pytest.raises(UserError, match=re.escape(f"[{TALL}, {WIDE}] has")):
        loops.new_accelerator().prepare_model(results.FrozenTable())


def test_lightning_s_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With a limit of its own: Lightning moves a model back to the CPU in the end, where a huge one takes 8 GB.
    monkeypatch.setattr("hf_mps.guards.huge_embedding.LIMIT", 64)
    model = loops.bert()
    model.requires_grad_(False)
    model.classifier.bias.requires_grad_(True)
    pl = lightning_loops.library()
    with pytest.raises(UserError, match=re.escape("a parameter of shape [40, 16] has 640 elements")):
        lightning_loops.trainer(pl, tmp_path, max_steps=1).fit(lightning_loops.module(pl, model))


def long_batches(rows: list[int], length: int = 8) -> list[dict[str, Any]]:
    return [{"input_ids": torch.ones(count, length, dtype=torch.long)} for count in rows]


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
