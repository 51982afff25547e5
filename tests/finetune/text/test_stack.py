"""A batch stacked in one write a column is the tokenizer's own, and what it does not know is left to the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BatchEncoding, DataCollatorWithPadding

from hf_mps.finetune.text.lengths import PadToBucket, pad_values, stack, stackable
from tests.finetune import tiny


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(tiny.model(tmp_path_factory.mktemp("stack") / "model"))


def rows(tokenizer: Any, **more: Any) -> list[dict[str, Any]]:
    texts = ["the cat is good", "it was on the mat", "bad", "the dog is bad it is"]
    return [
        {**tokenizer(text, "the tree"), **{name: values[at] for name, values in more.items()}}
        for at, text in enumerate(texts)
    ]


COLUMNS: dict[str, dict[str, Any]] = {
    "classes": {"label": [0, 1, 1, 0]},
    "numbers": {"labels": [0.5, 1.0, 2.0, 3.5]},
    "spans": {"start_positions": [1, 2, 0, 0], "end_positions": [2, 2, 0, 0]},
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("columns", COLUMNS)
def test_the_tokenizers_own_batch(tokenizer: Any, columns: str, side: str) -> None:
    tokenizer.padding_side = side
    inner = DataCollatorWithPadding(tokenizer)
    assert stackable(inner)
    made = rows(tokenizer, **COLUMNS[columns])
    ours = PadToBucket(inner, lambda width: width + 5, pad_values(tokenizer), side)(made)
    theirs = PadToBucket(lambda batch: inner(batch), lambda width: width + 5, pad_values(tokenizer), side)(made)
    assert type(ours) is type(theirs) is BatchEncoding
    assert set(ours) == set(theirs)
    for name, column in theirs.items():
        assert ours[name].dtype == column.dtype
        assert torch.equal(ours[name], column)


def test_the_rows_stay_as_they_are(tokenizer: Any) -> None:
    made = rows(tokenizer, label=[0, 1, 1, 0])
    before = [dict(row) for row in made]
    stack(made, lambda width: width, pad_values(tokenizer), "right")
    assert made == before


@pytest.mark.parametrize(
    "odd",
    [{"label": [[0, 1]] * 4}, {"bbox": [[[0, 0, 1, 1]]] * 4}, {"label": ["a", "b", "c", "d"]}, {"label": [None] * 4}],
)
def test_other_columns_are_left_to_the_tokenizer(tokenizer: Any, odd: dict[str, Any]) -> None:
    assert stack(rows(tokenizer, **odd), lambda width: width, pad_values(tokenizer), "right") is None


def test_rows_without_a_mask_are_left_to_the_tokenizer(tokenizer: Any) -> None:
    made = [{name: values for name, values in row.items() if name != "attention_mask"} for row in rows(tokenizer)]
    assert stack(made, lambda width: width, pad_values(tokenizer), "right") is None


def test_other_collators_are_left_alone(tokenizer: Any, tmp_path: Path) -> None:
    class Mine(DataCollatorWithPadding):
        """A subclass may do anything."""

    assert not stackable(Mine(tokenizer))
    assert not stackable(DataCollatorWithPadding(tokenizer, padding="max_length", max_length=9))
    assert not stackable(DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8))
    assert not stackable(lambda batch: batch)
