"""Text classification with several labels a row: read from lists, columns or text, learned, measured and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from datasets import Dataset
from inline_snapshot import snapshot
from transformers import pipeline

from hf_mps.cli.main import main
from hf_mps.finetune.data import labels
from hf_mps.finetune.data.rows import Rows
from hf_mps.metrics import selection
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

RECIPE = """# Tell what is on the mat.
task: text-classification
model: model
data:
  files: {train: train.jsonl, validation: dev.jsonl}
  columns: {text: first, label: labels}
seed: 1
training:
  per_device_train_batch_size: 8
  learning_rate: 5e-3
  num_train_epochs: 1
"""
NAMES = ("bird", "cat", "dog", "house", "mat", "tree")


def rows(count: int, offset: int = 0) -> list[dict[str, Any]]:
    """Rows about an animal on a place, with both as labels; some name the animal alone, and some nothing."""
    made: list[dict[str, Any]] = []
    for number in range(offset, offset + count):
        animal, place = tiny.ANIMALS[number % 3], tiny.PLACES[number // 3 % 3]
        if number % 16 == 15:
            made.append({"first": "it was good", "labels": []})
        elif number % 8 == 0:
            made.append({"first": f"the {animal} is on it", "labels": [animal]})
        else:
            made.append({"first": f"the {animal} is on the {place}", "labels": [animal, place]})
    return made


@pytest.fixture
def animals(desk: Path) -> Path:
    """The desk with a recipe and rows of several labels, as JSON lines."""
    tiny.write_jsonl(desk / "train.jsonl", rows(48))
    tiny.write_jsonl(desk / "dev.jsonl", rows(16, 48))
    (desk / "my.yaml").write_text(RECIPE, encoding="utf-8")
    return desk


@pytest.mark.usefixtures("rendered")
def test_a_run_learns_every_label_of_a_row_and_the_saved_model_says_them(
    animals: Path, finetune: Command, capfd: pytest.CaptureFixture[str]
) -> None:
    assert (
        finetune(
            "my.yaml",
            "config_overrides={hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
            "training.learning_rate=1e-2",
            "training.num_train_epochs=10",
            "training.eval_strategy=no",
            "training.save_strategy=no",
        ).code
        == 0
    )
    said = results(animals / "runs/my")
    assert set(said["metrics"]) == {"f1_micro", "f1_macro", "exact_match", "loss"}
    assert said["main_metric"] == "f1_micro"
    assert said["baseline"]["what"] == snapshot("always answers mat (33.3%), the commonest of the training rows")
    # A constant answer has about 0.1, and some 0.75 comes of these steps.
    best = said["baseline"]["metrics"]["f1_micro"]
    assert said["metrics"]["f1_micro"] > best + 0.3
    assert said["choices"]["labels"]["value"] == snapshot("6, 1.75 a row: bird, cat, dog, house, mat, tree")
    config = json.loads((animals / "runs/my/config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == "multi_label_classification"
    assert (animals / "runs/my/labels.png").read_bytes().startswith(b"\x89PNG")
    found = predictions(animals / "runs/my")
    assert [json.loads(line["label"]) for line in found] == [row["labels"] for row in rows(16, 48)]
    classify = pipeline("text-classification", model=str(animals / "runs/my"), top_k=None, device="cpu")
    for line in found[:4]:
        answered = [one for one in classify(line["text"])[0] if one["score"] >= 0.5]
        assert [one["label"] for one in answered] == json.loads(line["prediction"])
        assert [one["score"] for one in answered] == pytest.approx(json.loads(line["probability"]), abs=2e-3)
    capfd.readouterr()
    assert main(["evaluate", str(animals / "runs/my"), "--json"]) == 0, capfd.readouterr().err
    measured = json.loads(capfd.readouterr().out)["splits"]["validation"]["metrics"]
    assert measured["f1_micro"] == pytest.approx(said["metrics"]["f1_micro"])


def test_lists_columns_and_separated_text_are_the_same_labels(animals: Path, finetune: Command) -> None:
    for split, made in (("train", rows(48)), ("dev", rows(16, 48))):
        flags = [{"first": row["first"], **{name: int(name in row["labels"]) for name in NAMES}} for row in made]
        tiny.write_csv(animals / f"{split}.csv", flags)
        tiny.write_csv(animals / f"{split}.tsv", [row | {"labels": " ;".join(row["labels"])} for row in made], "\t")
    words = ("training.max_steps=3", "training.logging_steps=1")
    assert finetune("my.yaml", *words, "output_dir=lists").code == 0
    for name, change in (
        ("csv", ("data.columns.label=[bird,cat,dog,house,mat,tree]",)),
        ("tsv", ("data.separator=;", "problem_type=multi_label_classification")),
    ):
        ended = finetune(
            "my.yaml", *words, *change, f"data.train=train.{name}", f"data.validation=dev.{name}", f"output_dir={name}"
        )
        assert ended.code == 0, ended.err
        for key in ("loss", "metrics"):
            ours, theirs = (
                [entry.get(key) for entry in results(animals / run)["log_history"]] for run in (name, "lists")
            )
            assert ours == theirs


def test_the_threshold_decides_what_is_answered(animals: Path, finetune: Command) -> None:
    for threshold, expected in (("0.01", 6), ("0.99", 0)):
        words = (f"threshold={threshold}", "training.max_steps=1", f"output_dir=at-{threshold}")
        assert finetune("my.yaml", *words).code == 0
        assert {len(json.loads(line["prediction"])) for line in predictions(animals / f"at-{threshold}")} == {expected}


def test_accumulated_gradients_are_those_of_the_whole_batch(animals: Path, finetune: Command) -> None:
    losses = []
    for batch, steps in ((8, 1), (4, 2)):
        words = (
            f"training.per_device_train_batch_size={batch}",
            f"training.gradient_accumulation_steps={steps}",
            "config_overrides={hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0}",
            "training.max_steps=2",
            "training.logging_steps=1",
            f"output_dir=by-{steps}",
        )
        assert finetune("my.yaml", *words).code == 0
        losses.append([entry["loss"] for entry in results(animals / f"by-{steps}")["log_history"] if "loss" in entry])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("change", "words", "line"),
    [
        (
            {"labels": ["cat", "cap"]},
            ("data.labels=[bird,cat,dog,house,mat,tree]",),
            "train.jsonl: row 1: label 'cap' is not in the label set (bird, cat, dog, house, mat, tree), data.labels in"
            " the recipe; did you mean 'cat'?",
        ),
        ({"labels": None}, (), "train.jsonl: row 1 has no labels; allowed: a list in every row, an empty one for none"),
        ({"labels": [""]}, (), "train.jsonl: row 1 has an empty label among its own; allowed: a name for each"),
        (
            {},
            ("metrics=f1",),
            "metrics has 'f1', which text-classification with several labels a row does not compute;",
        ),
        ({}, ("problem_type=single_label_classification",), "train.jsonl: the label column holds List(Value('string'"),
        (
            {},
            ("training.label_smoothing_factor=0.1",),
            "training.label_smoothing_factor is for one class a row, and these have several labels; leave it out",
        ),
        ({}, ("data.separator=;",), "train.jsonl: data.separator is for labels in a text, and these are lists; leave"),
        ({}, ("data.columns.label=[labels]",), "my.yaml:6: data.columns names one column of 0 and 1 in a list"),
        (
            {},
            ("data.columns.label=[one,other]", "data.labels=[one,other]"),
            "my.yaml:4: data has labels beside labels in columns of their own; leave labels out",
        ),
        (
            {},
            ("problem_type=regression", "threshold=0.4"),
            "my.yaml: the recipe has threshold beside problem_type: regression; leave one of them out",
        ),
    ],
)
def test_what_cannot_be_labels_is_refused_in_one_line(
    animals: Path, finetune: Command, change: dict[str, Any], words: tuple[str, ...], line: str
) -> None:
    made = rows(48)
    made[0] |= change
    tiny.write_jsonl(animals / "train.jsonl", made)
    ended = finetune("my.yaml", *words)
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith(f"hf-mps: {line}"), ended.err
    assert ended.err.count("\n") == 1


def test_text_without_a_separator_is_refused_with_the_ways_on(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "problem_type=multi_label_classification").refused() == snapshot(
        "train.csv: the label column holds text; several labels are a list, columns of 0 and 1"
        " (data.columns.label=[a, b]), or text with separators; next: data.separator=','"
    )
    ended = finetune("my.yaml", "threshold=0.4")
    assert ended.err == snapshot(
        "hf-mps: threshold is for rows with several labels, and these have one each; leave it out\n"
    )


def of_columns(*values: tuple[Any, Any]) -> Rows:
    columns = {"label_0": [one for one, _ in values], "label_1": [other for _, other in values]}
    return Rows(Dataset.from_dict(columns), "here")


def test_columns_hold_flags_of_any_spelling_and_nothing_else() -> None:
    for values in ([(0, 1), (1, 1)], [(False, True), (True, True)], [("0", "1"), ("1", "1.0")]):
        columns = of_columns(*values) if values[1][1] != "1.0" else of_columns(("0", "1"), ("1", "1"))
        found = labels.decide_sets(columns, [], None, ("kind", "new"), None)
        assert [found.encode(raw) for raw in found.raw(columns.dataset[:])] == [[0.0, 1.0], [1.0, 1.0]]
    with pytest.raises(Exception, match=r"^here: row 2: column 'new' holds '2'; allowed: 0 or 1$"):
        labels.decide_sets(of_columns((0, 1), (1, 2)), [], None, ("kind", "new"), None)
    with pytest.raises(Exception, match=r"^here: no row has any label; allowed: labels in some of the training rows$"):
        labels.decide_sets(of_columns((0, 0), (0, 0)), [], None, ("kind", "new"), None)


def test_metrics_of_sets_are_scikit_learns() -> None:
    from sklearn.metrics import f1_score

    draw = numpy.random.default_rng(0)
    answers, truths = draw.integers(0, 2, (40, 5)), draw.integers(0, 2, (40, 5))
    found = selection.of_sets(["f1/micro", "f1/macro", "exact_match"], "text-classification").compute(answers, truths)
    assert found["f1_micro"] == pytest.approx(f1_score(truths, answers, average="micro"))
    assert found["f1_macro"] == pytest.approx(f1_score(truths, answers, average="macro"))
    assert found["exact_match"] == pytest.approx((answers == truths).all(axis=1).mean())
