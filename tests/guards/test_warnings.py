"""Hazards that nothing can cure from outside are told of, or refused, before they do harm."""

from __future__ import annotations

import re
import warnings
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


def test_a_refusal_is_the_only_line() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", GuardNotice)
        with pytest.raises(UserError):
            torch.optim.SGD([results.huge()])


def long_batches(rows: list[int], length: int = 8) -> list[dict[str, Any]]:
    return [{"input_ids": torch.ones(count, length, dtype=torch.long)} for count in rows]


def sent(batches: list[Any]) -> int:
    """Move batches in an Accelerate loop; how many came."""
    return len(list(loops.new_accelerator().prepare(torch.utils.data.DataLoader(batches, batch_size=None))))


@pytest.mark.parametrize("rows", [[4, 4097], [4097, 4, 4097]])
def test_such_a_batch_is_warned_of_in_an_accelerate_loop(rows: list[int]) -> None:
    with pytest.warns(GuardNotice, match="a batch of 4097 x 8 tokens after other shapes: .*a batch size of 4096"):
        assert sent(long_batches(rows)) == len(rows)


def test_one_of_a_tensor_dataset_is_too() -> None:
    batches = [(batch["input_ids"], torch.ones(1, 2, 3)) for batch in long_batches([4, 4097])]
    with pytest.warns(GuardNotice, match="a batch of 4097 x 8 tokens after other shapes"):
        assert sent(batches) == 2


def test_large_batches_of_one_shape_are_not() -> None:
    assert sent(long_batches([4097, 4097])) == 2
    assert not guards.acted()


def test_nor_are_those_without_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        assert sent(long_batches([4, 4097])) == 2
    monkeypatch.setattr("hf_mps.guards.large_batch_grad.TOKENS", 100)
    run = loops.trainer(tmp_path, per_device_eval_batch_size=32)
    for rows in (loops.rows()[:8], loops.rows()):
        run.evaluate(rows)
    assert "large-batch-grad" not in [each["name"] for each in guards.acted()]


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
