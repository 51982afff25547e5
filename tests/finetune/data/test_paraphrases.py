"""The quickstart's rows: as many as promised, two thirds of them paraphrases, and nothing of validation in training."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import load
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.run import run_dir
from hf_mps.finetune.tasks.text_classification import Data

COLUMNS = {"text": "sentence1", "text_pair": "sentence2", "label": "label"}


def pairs_of(**sizes: int) -> dict[str, Rows]:
    return load.load(Data.model_validate({"generated": "pairs", "rows": sizes, "columns": COLUMNS}), seed=42)


@pytest.fixture(scope="module")
def rows() -> dict[str, Rows]:
    return pairs_of(train=2500, validation=500)


def sentences(split: Dataset) -> list[str]:
    return [*split["text"], *split["text_pair"]]


def test_the_rows_are_those_of_the_published_result(rows: dict[str, Rows]) -> None:
    assert run_dir.digest_rows(rows) == {
        "train": {"rows": 2500, "digest": "c3d40cd53fe91a35af3cfbe1dc949d37"},
        "validation": {"rows": 500, "digest": "5bc17f3f8637582d86c08201bb5318cd"},
    }


@pytest.mark.parametrize("split", ["train", "validation"])
def test_64_of_100_are_paraphrases_as_in_mrpc_two_thirds_are(rows: dict[str, Rows], split: str) -> None:
    labels = rows[split].dataset["label"]
    assert Counter(labels) == {1: 0.64 * len(labels), 0: 0.36 * len(labels)}


def test_train_and_validation_share_no_sentence_and_no_sentence_comes_twice(rows: dict[str, Rows]) -> None:
    train, validation = sentences(rows["train"].dataset), sentences(rows["validation"].dataset)
    assert len(set(train)) == len(train)
    assert len(set(validation)) == len(validation)
    assert not set(train) & set(validation)


def test_sentences_are_well_formed(rows: dict[str, Rows]) -> None:
    for sentence in [*sentences(rows["train"].dataset), *sentences(rows["validation"].dataset)]:
        assert re.fullmatch(r"[A-Z$].*\.", sentence), sentence
        for wrong in (r"  ", r" [,.]", r"[,.]{2}", r"[{}~|]", r"[+-]( |\.)", r"\b(\w+) \1\b"):
            assert not re.search(wrong, sentence, re.IGNORECASE), sentence
        assert not re.search(
            r"\b[Aa] [aeioAEIO]|\b[Aa]n [^aeiouAEIOU$81]|\ba (8|11|18)\b|\ba \$(8|11|18)\b", sentence
        ), sentence


def test_fewer_rows_are_the_first_ones(rows: dict[str, Rows]) -> None:
    few = pairs_of(train=64, validation=32)
    for split, count in (("train", 64), ("validation", 32)):
        assert few[split].dataset.to_list() == rows[split].dataset.to_list()[:count]


def test_more_rows_than_there_are_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^data\.rows\.train is 2501; allowed: up to 2,500 of the generated pairs$"):
        pairs_of(train=2501)


def test_no_table_of_the_recipes_folder_is_without_a_word_on_where_it_comes_from() -> None:
    folder: Path = catalogue.folder() / "data"
    told = (folder / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in folder.glob("*.tsv") if f"`{path.name}`" not in told] == []
