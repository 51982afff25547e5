"""Text classification: predictions, pictures, further splits, and labels that a later split does not share."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
from inline_snapshot import snapshot
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_mps.finetune.data import load
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.tasks.text_classification import TextClassification
from tests.finetune import tiny
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command


@pytest.mark.usefixtures("rendered")
def test_predictions_hold_inputs_truth_answer_and_its_probability(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml").code == 0
    found = predictions(desk / "runs/my")
    dev = tiny.rows(16, 48)
    assert [(line["text"], line["text_pair"], line["label"]) for line in found] == [
        (row["first"], row["second"], str(row["label"])) for row in dev
    ]
    right = sum(line["label"] == line["prediction"] for line in found)
    assert results(desk / "runs/my")["metrics"]["accuracy"] == right / 16
    model = AutoModelForSequenceClassification.from_pretrained(desk / "runs/my").eval()
    tokenizer = AutoTokenizer.from_pretrained(desk / "runs/my")
    inputs = tokenizer([row["first"] for row in dev], [row["second"] for row in dev], padding=True, return_tensors="pt")
    shares, ids = model(**inputs).logits.softmax(-1).max(-1)
    assert [int(line["prediction"]) for line in found] == ids.tolist()
    assert [float(line["probability"]) for line in found] == pytest.approx(shares.tolist(), abs=1e-3)
    assert (desk / "runs/my/confusion_matrix.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("rendered")
def test_values_are_predicted_as_numbers_and_drawn_over_the_truth(desk: Path, finetune: Command) -> None:
    for name, rows in (("train", tiny.rows(48)), ("dev", tiny.rows(16, 48))):
        tiny.write_csv(desk / f"{name}.csv", [{**row, "label": f"{2.5 * row['label']:.3f}"} for row in rows])
    assert finetune("my.yaml", "metrics=glue/stsb").code == 0
    found = predictions(desk / "runs/my")
    assert set(found[0]) == {"text", "text_pair", "label", "prediction"}
    assert [float(line["label"]) for line in found] == [2.5 * row["label"] for row in tiny.rows(16, 48)]
    assert (desk / "runs/my/values.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((desk / "runs/my/config.json").read_text(encoding="utf-8"))
    assert config["problem_type"] == "regression"
    assert set(results(desk / "runs/my")["metrics"]) == {"pearsonr", "spearmanr", "loss"}


def test_two_validation_splits_are_both_measured_as_mnli_has_them(desk: Path, finetune: Command) -> None:
    other = [{**row, "label": 1 - row["label"]} for row in tiny.rows(16, 48)]
    tiny.write_csv(desk / "other.csv", other)
    finetune("my.yaml", "data.files.mismatched=other.csv", "training.num_train_epochs=4").finished()
    said = results(desk / "runs/my")
    assert set(said["metrics"]) == {
        f"{split}{name}" for split in ("", "mismatched_") for name in ("f1", "accuracy", "loss")
    }
    # The same texts with every label turned round.
    assert said["metrics"]["mismatched_accuracy"] == pytest.approx(1 - said["metrics"]["accuracy"])
    assert said["choices"]["data"]["value"] == "48 + 16 + 16 rows"
    assert len(predictions(desk / "runs/my")) == 16


def test_a_promise_of_a_further_split_is_kept_or_refused(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "data.files.test=dev.csv", "expect.test_accuracy=1.01")
    assert ended.code == 1
    assert ended.err.startswith("hf-mps: expected test_accuracy at least 1.01: missed, with ")
    assert finetune("my.yaml", "expect.test_accuracy=0.5", "output_dir=other").refused() == snapshot(
        "expect.test_accuracy is not measured; allowed: f1, accuracy; did you mean 'accuracy'?"
    )


@pytest.mark.parametrize(
    ("label", "line"),
    [
        (
            "2",
            "other.csv: row 3: label '2' is not in the label set (0, 1), found in train.csv; next: correct it, or name"
            " every class in data.labels",
        ),
        ("", "other.csv: row 3 has no label; allowed: a label in every row"),
    ],
)
def test_a_label_that_training_never_saw_is_refused_in_every_split(
    desk: Path, finetune: Command, label: str, line: str
) -> None:
    rows = [{**row, "label": str(row["label"])} for row in tiny.rows(16)]
    rows[2]["label"] = label
    tiny.write_csv(desk / "other.csv", rows)
    assert finetune("my.yaml", "data.files.test=other.csv").refused() == f"{line}"


def test_a_column_in_which_every_row_differs_is_no_label(desk: Path, finetune: Command) -> None:
    tiny.write_csv(desk / "train.csv", [{**row, "label": f"id{place}"} for place, row in enumerate(tiny.rows(13))])
    assert finetune("my.yaml").refused() == snapshot(
        "train.csv: each of its 13 rows has another label; next: give the column of classes with data.columns.label"
    )


def test_splits_that_number_their_classes_otherwise_are_refused(desk: Path, finetune: Command) -> None:
    for split, names in (("train", ["poor", "fine"]), ("dev", ["fine", "poor"])):
        features = datasets.Features(
            first=datasets.Value("string"), second=datasets.Value("string"), label=datasets.ClassLabel(names=names)
        )
        datasets.Dataset.from_list(tiny.rows(16), features=features).to_parquet(desk / f"{split}.parquet")
    assert finetune("my.yaml", "data.files={train: train.parquet, validation: dev.parquet}").refused() == snapshot(
        "dev.parquet: its classes are fine, poor, and those of train.parquet poor, fine; allowed: the"
        " same in the same order"
    )


def test_texts_are_cut_to_max_length_with_their_special_tokens(desk: Path, finetune: Command) -> None:
    made = load_recipe("my.yaml", ["max_length=7"])
    rows = load.load(made.recipe.data, 1)
    prepared = TextClassification(made.recipe, checkpoint.resolve("model"), "mps").prepare(rows)
    assert {len(row) for row in prepared.train["input_ids"]} == {7}
    assert {(row[0], row[-1]) for row in prepared.train["input_ids"]} == {(2, 3)}  # [CLS] and [SEP]
    assert list(prepared.token_counts or ()) == [7] * 48
    assert "48 at the limit of 7 and perhaps cut" in prepared.choices["lengths"].reason


@pytest.mark.parametrize(
    ("metric", "labels", "line"),
    [
        ("wer", ("0", "1"), "metrics has 'wer', which text-classification does not compute; allowed: accuracy, "),
        (
            "accuracy",
            ("0.5", "1.5"),
            "metrics has 'accuracy', which text-classification with labels that are numbers (regression) does not"
            " compute; allowed: pearsonr, spearmanr, mse, rmse, mae, glue/stsb",
        ),
    ],
)
def test_a_metric_of_another_kind_is_refused(
    desk: Path, finetune: Command, metric: str, labels: tuple[str, str], line: str
) -> None:
    for name, rows in (("train", tiny.rows(12)), ("dev", tiny.rows(12))):
        tiny.write_csv(desk / f"{name}.csv", [{**row, "label": labels[row["label"]]} for row in rows])
    assert finetune("my.yaml", f"metrics={metric}").refused().startswith(line)


def test_probabilities_are_softmaxes_of_any_size() -> None:
    from hf_mps.finetune.report.predictions import probabilities, rows

    shares = probabilities([[1000.0, 1000.0], [0.0, -1000.0]])
    assert shares.tolist() == [[0.5, 0.5], [1.0, 0.0]]
    found = rows([{"text": "a"}], [0], [[0.0, 1.0986122886681098]], ["bad", "good"])
    assert found == [{"text": "a", "label": "bad", "prediction": "good", "probability": 0.75}]
