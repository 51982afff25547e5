"""Choosing one of a few texts: how choices are read, padded and measured, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import AutoTokenizer

from hf_mps.finetune.data import load
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.tasks.multiple_choice import MultipleChoice
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

RECIPE = """# Choose the place.
task: multiple-choice
model: model
data:
  files: {train: train.jsonl, validation: dev.jsonl}
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 1e-2
  num_train_epochs: 4
  eval_strategy: 'no'
  save_strategy: 'no'
"""


def rows(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """Rows of three choices, the right one of which is the only one that says `good`."""
    made = []
    for number in range(offset, offset + count):
        right = number // 2 % 3
        choices = [
            f"the {animal} is {'good' if place == right else 'bad'}" for place, animal in enumerate(tiny.ANIMALS)
        ]
        made.append({"context": f"it was on the {tiny.PLACES[number % 3]}", "choices": choices, "label": right})
    return made


@pytest.fixture
def choosing(desk: Path) -> Path:
    """The desk with a recipe that chooses, and its rows."""
    tiny.write_jsonl(desk / "train.jsonl", rows(48))
    tiny.write_jsonl(desk / "dev.jsonl", rows(18, 48))
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_a_model_learns_to_choose_and_its_answers_are_written_down(choosing: Path, finetune: Command) -> None:
    finetune("my.yaml").finished()
    said = results(choosing / "runs/my")
    assert said["metrics"]["accuracy"] == 1.0
    assert said["baseline"]["metrics"] == {"accuracy": pytest.approx(1 / 3)}
    assert said["choices"]["choices"] == {"value": 3, "reason": snapshot("in every row of train.jsonl")}
    assert said["fallback"] == []
    lines = predictions(choosing / "runs/my")
    dev = rows(18, 48)
    assert [(line["context"], json.loads(line["choices"]), int(line["label"])) for line in lines] == [
        (row["context"], row["choices"], row["label"]) for row in dev
    ]
    assert [int(line["prediction"]) for line in lines] == [row["label"] for row in dev]
    assert all(1 / 3 < float(line["probability"]) <= 1 for line in lines)
    assert (choosing / "runs/my/confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


def test_choices_in_columns_of_their_own_with_letters_and_a_start_train_alike(
    choosing: Path, finetune: Command
) -> None:
    # As SWAG has them: `the` stands apart, the rest of each choice in a column of its own; csv, so all of it is text.
    for name, made in (("train", rows(48)), ("dev", rows(18, 48))):
        apart = [
            {"context": row["context"], "begin": "the", "label": "ABC"[row["label"]]}
            | {f"end{place}": choice.removeprefix("the ") for place, choice in enumerate(row["choices"])}
            for row in made
        ]
        tiny.write_csv(choosing / f"{name}.csv", apart)
    assert finetune("my.yaml", "training.max_steps=6", "output_dir=lists").code == 0
    columns = "data.columns={context: context, start: begin, choices: [end0, end1, end2], label: label}"
    files = "data.files={train: train.csv, validation: dev.csv}"
    finetune("my.yaml", "training.max_steps=6", files, columns, "output_dir=columns").finished()
    assert results(choosing / "lists")["metrics"] == results(choosing / "columns")["metrics"]


def test_every_choice_of_a_batch_is_padded_to_one_length_of_the_list(choosing: Path, finetune: Command) -> None:
    longer = [{**row, "context": row["context"] + " it" * (number % 5)} for number, row in enumerate(rows(48))]
    tiny.write_jsonl(choosing / "train.jsonl", longer)
    made = load_recipe("my.yaml")
    found = load.load(made.recipe.data, 1)
    prepared = MultipleChoice(made.recipe, checkpoint.resolve("model"), "mps").prepare(found)
    batch = prepared.collator([prepared.train[number] for number in range(4)])
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (4, 3, 16)
    assert prepared.choices["lengths"].value.shapes == (16,)
    assert batch["labels"].tolist() == [row["label"] for row in rows(4)]
    tokenizer = AutoTokenizer.from_pretrained("model")
    expected = tokenizer(longer[0]["context"], longer[0]["choices"][2])["input_ids"]
    assert batch["input_ids"][0, 2].tolist() == expected + [0] * (16 - len(expected))
    assert torch.equal(batch["attention_mask"].sum(-1), (batch["input_ids"] != 0).sum(-1))
    assert prepared.token_counts == [len(expected) + number % 5 for number in range(48)]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"choices": ["good"]}, "dev.jsonl: row 3 has 1 choices; allowed: 3, as many in every row"),
        ({"choices": None}, "dev.jsonl: row 3 has 0 choices; allowed: 3, as many in every row"),
        ({"choices": ["good", None, "bad"]}, "dev.jsonl: row 3: choice 1 has no text; allowed: a text for each choice"),
        ({"context": None}, "dev.jsonl: row 3 has no context; allowed: a text in every row"),
        ({"label": 3}, "dev.jsonl: row 3: label '3' is no choice of it; allowed: 0 to 2, or A to C"),
        ({"label": -1}, "dev.jsonl: row 3 has no label; allowed: a label in every row"),
        ({"label": None}, "dev.jsonl: row 3 has no label; allowed: a label in every row"),
    ],
)
def test_rows_that_do_not_fit_are_refused_by_their_number(
    choosing: Path, finetune: Command, change: dict[str, Any], line: str
) -> None:
    made = rows(18, 48)
    made[2] |= change
    tiny.write_jsonl(choosing / "dev.jsonl", made)
    assert finetune("my.yaml").refused() == f"{line}"


def test_columns_that_cannot_be_are_refused(choosing: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "data.columns.choices=context").refused() == snapshot(
        "my.yaml:4: data.columns names one column for two roles (context, context, label); give each role"
        " its own column"
    )
    ended = finetune("my.yaml", "data.columns.choices=[choices]")
    assert ended.err.endswith("names fewer than two choices; give a column for each, or one column of lists\n")
    ended = finetune("my.yaml", "data.columns={context: choices, choices: context}")
    assert ended.err == snapshot(
        "hf-mps: train.jsonl: data.columns.context names a column of type list; allowed: text\n"
    )
    ended = finetune("my.yaml", "metrics=wer")
    assert ended.err.startswith(
        "hf-mps: metrics has 'wer', which multiple-choice does not compute; allowed: accuracy, "
    )
