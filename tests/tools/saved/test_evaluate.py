"""hf-mps evaluate: a run's own figures for its own rows, others for other rows, and nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from tests.finetune import tiny
from tests.finetune.tiny import Ended
from tests.snapshots import masked
from tests.tools.saved.conftest import RECIPES, Kept, Made

pytestmark = pytest.mark.usefixtures("own_cache")

Command = Callable[..., Ended]


def results(run: Kept) -> dict[str, Any]:
    return json.loads((run.folder / "results.json").read_text(encoding="utf-8"))


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*")}


@pytest.mark.rotated
@pytest.mark.parametrize("task", RECIPES)
def test_the_validation_rows_give_the_runs_own_figures_and_nothing_is_written(
    task: str, kept: Made, command: Command
) -> None:
    run = kept(task)
    before = contents(run.folder)
    ended = command("evaluate", run.folder, "--json")
    assert ended.code == 0, ended.err
    measured = json.loads(ended.out)
    own = results(run)["metrics"]
    assert len(own) >= 2
    found = {
        name if split == "validation" else f"{split}_{name}": value
        for split, one in measured["splits"].items()
        for name, value in one["metrics"].items()
    }
    # Batches of other lengths round otherwise; an adapter that was merged is rounded once more.
    assert found == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in own.items()}
    assert measured["main_metric"] == results(run)["main_metric"]
    assert contents(run.folder) == before


def test_other_rows_are_measured_with_the_classes_of_the_run(kept: Made, command: Command, tmp_path: Path) -> None:
    run = kept("text-classification")
    answers = run.predictions
    rows = [json.loads(line) for line in run.rows.read_text(encoding="utf-8").splitlines()]
    # The rows that the model gets right, and nothing else: all of one class, perhaps, and never of two.
    right = [row for row, answer in zip(rows, answers, strict=True) if answer["label"] == answer["prediction"]]
    wrong = [row for row, answer in zip(rows, answers, strict=True) if answer["label"] != answer["prediction"]]
    assert right
    assert wrong
    files = [tiny.write_jsonl(tmp_path / f"{n}.jsonl", some) for n, some in enumerate((right, wrong))]
    words = [f"data.validation={files[0]}", f"data.test={files[1]}"]
    splits = json.loads(command("evaluate", run.folder, *words, "--json").out)["splits"]
    assert {name: split["metrics"]["accuracy"] for name, split in splits.items()} == {"validation": 1.0, "test": 0.0}
    assert {name: split["rows"] for name, split in splits.items()} == {"validation": len(right), "test": len(wrong)}
    alone = json.loads(command("evaluate", run.folder, f"data.test={files[1]}", "--json").out)["splits"]
    assert alone == {"test": splits["test"]}


def test_a_table_has_the_runs_figures_beside_them(kept: Made, command: Command) -> None:
    run = kept("text-classification")
    own = results(run)["metrics"]
    lines = command("evaluate", run.folder).out.splitlines()
    assert lines[0].split() == ["metric", "validation", "its", "run"]
    assert {line.split()[0]: line.split()[1:] for line in lines[1:-1]} == {
        name: [f"{value:.4f}"] * 2 for name, value in own.items()
    }


def test_a_folder_of_save_pretrained_is_measured_on_rows_that_are_given(
    kept: Made, command: Command, tmp_path: Path
) -> None:
    run = kept("text-classification")
    model = tmp_path / "model"
    shutil.copytree(run.folder, model, ignore=shutil.ignore_patterns("results.json", "recipe.yaml", "checkpoint-*"))
    words = ["data.text=sentence1", "data.text_pair=sentence2"]
    ended = command("evaluate", model, f"data.validation={run.rows}", *words, "--json")
    assert ended.code == 0, ended.err
    measured = json.loads(ended.out)
    assert measured["task"]["reason"] == "its configuration names BertForSequenceClassification"
    assert measured["splits"]["validation"]["metrics"]["accuracy"] == results(run)["metrics"]["accuracy"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["other.csv"],
            snapshot("hf-mps: 'other.csv' is not KEY=VALUE; next, to measure a file: data.validation=other.csv\n"),
        ),
        (
            ["data.train=other.csv"],
            snapshot("hf-mps: evaluate reads no training rows; next, to measure a file: data.validation=FILE\n"),
        ),
        (["data.validation=other.csv"], snapshot("hf-mps: data.files.validation: other.csv: there is no such file\n")),
        (["training.num_train_epochs=2"], "hf-mps: training.num_train_epochs changes only a training; leave it out\n"),
    ],
)
def test_what_cannot_be_measured_ends_in_one_line(
    kept: Made, command: Command, words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = command("evaluate", kept("text-classification").folder, *words)
    assert (ended.code, ended.out, masked(ended.err)) == (2, "", said)
