"""Batches of rows of like length: every row once, random and repeatable, and a run that goes on sees the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_mps.finetune.text import buckets
from hf_mps.finetune.text.buckets import BucketSampler
from tests.finetune import tiny
from tests.finetune.run_files import results
from tests.finetune.text.test_lengths import recipe, rows
from tests.finetune.tiny import Command

LENGTHS = [8, 16, 24, 16, 8, 32, 16, 24, 8, 8] * 11  # 110 rows


def cut(order: BucketSampler) -> list[list[int]]:
    """An epoch's batches of 8."""
    flat = list(order)
    return [flat[at : at + 8] for at in range(0, len(flat), 8)]


def test_an_epoch_holds_every_row_once_and_its_batches_mostly_one_length() -> None:
    epoch = cut(BucketSampler(LENGTHS, 8, seed=5))
    assert sorted(row for batch in epoch for row in batch) == list(range(110))
    assert [len(batch) for batch in epoch] == [8] * 13 + [6]
    mixed = [batch for batch in epoch if len({LENGTHS[row] for row in batch}) > 1]
    assert len(mixed) <= 4  # what is left over of four lengths, less than a batch each
    assert max(LENGTHS[row] for row in epoch[0]) == 32


def test_the_order_follows_from_seed_and_epoch_alone() -> None:
    one, other = BucketSampler(LENGTHS, 8, seed=5), BucketSampler(LENGTHS, 8, seed=5)
    first = list(one)
    one.set_epoch(1)
    second = list(one)
    assert first != second
    other.set_epoch(1)
    assert list(other) == second
    assert list(BucketSampler(LENGTHS, 8, seed=6)) != first
    assert len(one) == 110


def test_fewer_rows_than_a_batch_are_one_batch() -> None:
    assert sorted(BucketSampler([8, 16, 8], 8, seed=0)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("said", "counts", "value", "reason"),
    [
        ({}, LENGTHS, "like length together", "a batch holds rows of one length of the list, drawn at random"),
        ({}, [8] * 110, "random", "every row is of one length"),
        ({}, LENGTHS[:60], "random", "60 rows are too few to draw batches of one length from"),
        ({}, None, "random", "every row is of one length"),
        ({"optimizations": False}, LENGTHS, "random", "optimizations is false in the recipe"),
        ({"padding": "max_length"}, LENGTHS, "random", "every batch is padded to one length"),
        ({"training": {"train_sampling_strategy": "sequential"}}, LENGTHS, "sequential", "the recipe says so"),
    ],
)
def test_how_batches_are_drawn_is_a_choice_with_a_reason(
    said: dict[str, Any], counts: list[int] | None, value: str, reason: str
) -> None:
    choice = buckets.decide(recipe(**said), counts, 8)
    assert choice.value == value
    assert choice.reason.startswith(reason)


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_ends_with_the_same_weights(desk: Path, finetune: Command) -> None:
    tiny.write_csv(desk / "train.csv", rows(96))
    saved = ("training.save_strategy=steps", "training.save_steps=5", "training.num_train_epochs=2")
    finetune("my.yaml", "output_dir=whole", *saved, "training.save_total_limit=9").finished()
    said = results(desk / "whole")
    assert said["choices"]["sampling"]["value"] == "like length together"
    for step in (5, 15):
        on = f"training.resume_from_checkpoint=whole/checkpoint-{step}"
        assert finetune("my.yaml", f"output_dir=from-{step}", *saved, on).code == 0
        assert (desk / f"from-{step}/model.safetensors").read_bytes() == (desk / "whole/model.safetensors").read_bytes()
