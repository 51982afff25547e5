"""Texts to tokens: kept under a digest of all that they depend on, and refused in words where there is no text."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, load_dataset
from inline_snapshot import snapshot
from transformers import AutoTokenizer

from hf_mps.core.errors import UserError
from hf_mps.finetune.data import rows
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.text import tokens
from tests.refusals import refusal

Encode = Callable[[dict[str, list[Any]], list[int]], dict[str, Any]]


@pytest.fixture
def tokenizer(desk: Path) -> Any:
    """The tiny model's tokenizer, and a cache of this test's own."""
    return AutoTokenizer.from_pretrained(desk / "model")


def split(desk: Path) -> Rows:
    """The rows of the desk's csv, read anew as another run would."""
    name = str(desk / "train.csv")
    return Rows(load_dataset("csv", data_files={"train": name}, split="train"), "train.csv")


def test_a_digest_stays_through_calls_and_changes_with_the_tokenizer(tokenizer: Any, desk: Path) -> None:
    before = tokens.digest(tokenizer)
    tokenizer(["the cat", "the dog is good"], padding=True, truncation=True, max_length=5)
    again = AutoTokenizer.from_pretrained(desk / "model")
    assert tokens.digest(again) == before
    again.add_tokens(["wolf"])
    with_word = tokens.digest(again)
    again.chat_template = "{{ messages }}"
    assert len({before, with_word, tokens.digest(again)}) == 3


def test_what_was_tokenised_is_found_again_until_something_changes(tokenizer: Any, desk: Path) -> None:
    calls: list[int] = []

    def encode(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, Any]:
        calls.extend(indices)
        return {"input_ids": tokenizer(batch["first"])["input_ids"]}

    content = tokens.digest(tokenizer)
    first = tokens.map_cached(split(desk), encode, content=content, key=("test", 1))
    assert (len(first), first.column_names, calls) == (48, ["input_ids"], list(range(48)))
    again = tokens.map_cached(split(desk), encode, content=content, key=("test", 1))
    assert (again[:], len(calls)) == (first[:], 48)
    tokens.map_cached(split(desk), encode, content=content, key=("test", 2))
    assert len(calls) == 96
    tokens.map_cached(split(desk), encode, content="another tokenizer", key=("test", 1))
    assert len(calls) == 144
    tokens.map_cached(split(desk).sample([3, 1]), encode, content=content, key=("test", 1))
    assert len(calls) == 146


def test_rows_without_a_text_are_refused_by_their_number() -> None:
    rows = Rows(Dataset.from_dict({"text": ["a", None, "c"]}), "my.json", numbers=(4, 7, 9))
    assert tokens.texts(rows, "text", {"text": ["a", "c"]}, [0, 2]) == ["a", "c"]
    assert refusal(tokens.texts, rows, "text", {"text": ["a", None, "c"]}, [0, 1, 2]) == snapshot(
        "my.json: row 8 has no text; allowed: a text in every row"
    )


def test_a_column_that_is_no_text_is_refused() -> None:
    rows = Rows(Dataset.from_dict({"text": [1, 2], "second": ["a", "b"], "both": [["a"], ["b"]]}), "my.json")
    tokens.refuse_other_than_text(rows, ["second"])
    assert refusal(tokens.refuse_other_than_text, rows, ["second", "text"]) == snapshot(
        "my.json: data.columns.text names a column of type int64; allowed: text"
    )
    with pytest.raises(UserError, match=r"data\.columns\.both names a column of type"):
        tokens.refuse_other_than_text(rows, ["both"])


def test_rows_are_counted_as_they_stand_after_a_selection() -> None:
    features = Dataset.from_dict({"input_ids": [[1], [1, 2, 3], [], [1, 2]]})
    assert tokens.counts(features) == [1, 3, 0, 2]
    assert tokens.counts(features.select([3, 0])) == [2, 1]


def test_a_tokenizer_without_a_padding_token_is_lent_its_end_token(tokenizer: Any) -> None:
    class Config:
        pad_token_id: int | None = None

    config = Config()
    assert tokens.set_pad_token(tokenizer, config) == {}
    assert config.pad_token_id is None
    tokenizer.pad_token = None
    assert refusal(tokens.set_pad_token, tokenizer, config) == snapshot(
        "the model's tokenizer has neither a padding nor an end token, so rows cannot be batched"
    )
    tokenizer.eos_token = "[SEP]"
    lent = tokens.set_pad_token(tokenizer, config)["pad_token"]
    assert (lent.value, config.pad_token_id) == ("[SEP]", tokenizer.convert_tokens_to_ids("[SEP]"))
    assert lent.reason == snapshot("the tokenizer has none; the end token takes its place")


# A task in miniature, which counts its calls in a file; its features depend on another file's code.
TASK = """
from pathlib import Path

from datasets import Dataset
from lab import helper
from transformers import AutoTokenizer

from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.text import tokens


def sizes():
    tokenizer = AutoTokenizer.from_pretrained("model")

    def encode(batch, indices):
        with Path("calls").open("a") as file:
            file.write("x")
        return {"sizes": [helper.size(ids) for ids in tokenizer(batch["text"])["input_ids"]]}

    rows = Rows(Dataset.from_csv("rows.csv"), "rows.csv")
    return tokens.map_cached(rows, encode, content=tokens.digest(tokenizer), key=("miniature",))["sizes"][:]
"""


def test_features_are_made_anew_by_other_code_or_another_tokenizer_and_by_nothing_else(
    tokenizer: Any, desk: Path, tmp_path: Path, run_python: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[list[int], int]:
        """The features as a new process would make them, and how often they were made up to now."""
        for name in ("lab", "lab.task", "lab.helper"):
            sys.modules.pop(name, None)
        rows._package_digest.cache_clear()
        made = importlib.import_module("lab.task").sizes()
        return made, len((desk / "calls").read_text(encoding="utf-8"))

    monkeypatch.syspath_prepend(str(desk))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (desk / "lab").mkdir()
    (desk / "rows.csv").write_text("text\nthe cat\nthe dog is good\n", encoding="utf-8")
    for name, text in (("__init__", ""), ("task", TASK), ("helper", "def size(ids):\n    return len(ids)\n")):
        (desk / "lab" / f"{name}.py").write_text(text, encoding="utf-8")
    assert run() == ([4, 6], 1)
    assert run() == ([4, 6], 1)
    elsewhere = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    ended = run_python("-c", "from lab.task import sizes; print(sizes())", cwd=desk, env=elsewhere)
    assert (ended.stdout, (desk / "calls").read_text(encoding="utf-8")) == ("[4, 6]\n", "x"), ended.stderr
    (desk / "lab/helper.py").write_text("def size(ids):\n    return 10 * len(ids)\n", encoding="utf-8")
    assert run() == ([40, 60], 2)
    tokenizer.add_tokens(["wolf"])
    tokenizer.save_pretrained(desk / "model")
    assert run() == ([40, 60], 3)
