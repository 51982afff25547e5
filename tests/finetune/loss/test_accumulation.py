"""Gradient accumulation divides a loss once, whatever the model's head makes of the number of items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hf_mps.finetune.loss import deferred_head
from tests.finetune import builders


def accumulating(models: Path, folder: Path, architecture: str, task: str) -> Any:
    datasets.config.HF_DATASETS_CACHE = folder / "cache"
    text = folder / "text.txt"
    text.write_text("\n".join(builders.TEXTS * 4), encoding="utf-8")
    data = {"files": {"train": str(text), "validation": str(text)}}
    place = str(builders.model(models, architecture))
    prepared = builders.prepare(task=task, model=place, data=data, max_length=24, optimizations=False)
    return builders.trainer(prepared, folder / "run", gradient_accumulation_steps=4, max_steps=1, eval_on_start=False)


@pytest.fixture
def _cache_as_before() -> Any:
    before = datasets.config.HF_DATASETS_CACHE
    yield
    datasets.config.HF_DATASETS_CACHE = before


@pytest.mark.usefixtures("_cache_as_before")
@pytest.mark.parametrize(("settled", "times"), [(False, 4), (True, 1)])
def test_a_head_that_drops_the_number_of_items(models: Path, tmp_path: Path, settled: bool, times: int) -> None:
    """RoBERTa's: four accumulation steps give four times the loss, until Trainer is told to divide it."""
    trainer = accumulating(models, tmp_path, "roberta", "masked-lm")
    if settled:
        assert deferred_head.fix_accumulation_scaling(trainer) is True
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert loss == pytest.approx(6.0 * times, rel=0.02)  # the logarithm of 400 words


@pytest.mark.usefixtures("_cache_as_before")
def test_a_model_that_is_not_yet_where_it_trains_is_tried_where_it_is(models: Path, tmp_path: Path) -> None:
    """Under FSDP Trainer leaves it on the CPU until the training begins."""
    trainer = accumulating(models, tmp_path, "roberta", "masked-lm")
    trainer.model.to("cpu")
    assert trainer.args.device.type == "mps"
    assert deferred_head.fix_accumulation_scaling(trainer) is True
    assert next(trainer.model.parameters()).device.type == "cpu"


@pytest.mark.usefixtures("_cache_as_before")
def test_a_head_that_knows_it_is_left_alone(models: Path, tmp_path: Path) -> None:
    trainer = accumulating(models, tmp_path, "qwen3", "causal-lm")
    trainer.model.train()
    drawn = torch.get_rng_state()
    assert deferred_head.fix_accumulation_scaling(trainer) is False
    assert trainer.model_accepts_loss_kwargs
    assert torch.equal(torch.get_rng_state(), drawn)
    assert trainer.model.training


@pytest.mark.usefixtures("_cache_as_before")
def test_a_model_without_numbers_is_left_alone(models: Path, tmp_path: Path) -> None:
    """`hf-mps plan` has no loss to compare."""
    trainer = accumulating(models, tmp_path, "roberta", "masked-lm")
    trainer.model.to("meta")
    assert deferred_head.fix_accumulation_scaling(trainer) is False
    assert trainer.model_accepts_loss_kwargs
