"""What a training has reached is on the disk before anything is made of it, and no failure of that takes it away."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from inline_snapshot import snapshot
from transformers import Trainer

from hf_mps.finetune.report import predictions
from hf_mps.finetune.run import stages
from tests.distributed.launching import python
from tests.finetune import every_task
from tests.finetune.run_files import results
from tests.finetune.tiny import Command


def broken(*_: object, **__: object) -> Any:
    raise ZeroDivisionError("a bug\nof ours")


EACH = {"training.png", "README.md", "predictions.csv"}
REST = "ZeroDivisionError: a bug; the model and results.json are there\n"


@pytest.fixture
def run(desk: Path, finetune: Command) -> Any:
    """Run the recipe to a good end: its folder, and what came on stderr."""

    def ended() -> tuple[Path, str]:
        ended = finetune("my.yaml", "training.max_steps=2")
        assert ended.code == 0
        place = desk / "runs/my"
        assert (place / "model.safetensors").is_file()
        assert results(place)["metrics"].keys() == {"f1", "accuracy", "loss"}
        assert finetune("my.yaml", "training.max_steps=2").out.startswith("runs/my holds this recipe's finished run")
        return place, ended.err

    return ended


@pytest.mark.parametrize(
    ("fails", "lost", "answers", "pictures"),
    [
        ("hf_mps.finetune.report.plot.draw", "training.png", "predictions.csv", ["confusion_matrix.png"]),
        ("hf_mps.finetune.report.card", "README.md", "predictions.csv", ["confusion_matrix.png"]),
        ("transformers.Trainer.predict", "predictions.csv", None, []),
        (
            "hf_mps.finetune.tasks.text_classification.TextClassification._figures",
            "a picture of the predictions",
            "predictions.csv",
            [],
        ),
    ],
)
def test_what_fails_after_the_training_costs_itself_alone(
    run: Any, monkeypatch: pytest.MonkeyPatch, fails: str, lost: str, answers: str | None, pictures: list[str]
) -> None:
    monkeypatch.setattr(fails, broken)
    place, said = run()
    assert said == f"hf-mps: {lost} is left out: {REST}"
    assert (results(place)["predictions"], results(place)["pictures"]) == (answers, pictures)
    left = {path.name for path in place.iterdir()}
    assert left & EACH == EACH - {lost}
    assert lost == "README.md" or lost not in (place / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_stop_or_an_error_of_ours_after_the_training_keeps_the_model(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    monkeypatch.setattr(stages, "_measured", Mock(side_effect=error))
    words = ("my.yaml", "training.save_strategy=no", "training.max_steps=2")
    if error is KeyboardInterrupt:
        ended = finetune(*words)
        assert (ended.code, ended.err) == (130, snapshot("hf-mps: interrupted; the trained model is in runs/my\n"))
    else:
        with pytest.raises(error):
            finetune(*words)
    assert (desk / "runs/my/model.safetensors").is_file()


@pytest.mark.process
def test_a_run_killed_before_its_report_gets_it_from_the_next_call_without_training(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("my.yaml", "training.save_strategy=no", "training.max_steps=2")
    assert finetune(*words, "output_dir=whole").code == 0
    killed = python("-c", KILLED, *words, env={"HF_MPS_SIMULATE": "1", "HF_MPS_DEVICE": "mps"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    run, whole = desk / "runs/my", desk / "whole"
    assert not (run / "results.json").exists()
    monkeypatch.setattr(Trainer, "train", broken)
    ended = finetune(*words).finished()
    assert ended.out.startswith("runs/my: the training has ended; the report is written from what it stored\n")
    assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}
    assert (run / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes()
    for name in ("metrics", "main_metric", "predictions", "baseline", "expectation"):
        assert results(run)[name] == results(whole)[name]
    assert results(run)["choices"].keys() == results(whole)["choices"].keys()
    assert finetune(*words).out.startswith("runs/my holds this recipe's finished run")


def test_a_report_that_is_written_later_has_the_answers_of_merged_adapters(
    tmp_path: Path, own_cache: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_task.write(tmp_path, ("packed",), dropout=0.0)
    monkeypatch.chdir(tmp_path)
    words = ("packed.yaml", "training.max_steps=9", "training.learning_rate=0.01")
    assert finetune(*words, "output_dir=whole").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(predictions, "write", Mock(side_effect=KeyboardInterrupt))
        assert finetune(*words).code == 130
    assert "the report is written from what it stored" in finetune(*words).out
    run, whole = tmp_path / "runs/packed", tmp_path / "whole"
    assert (run / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes()


KILLED = """
import os, signal, sys
from hf_mps.cli.main import main
from hf_mps.finetune.report import predictions
predictions.write = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
main(["finetune", *sys.argv[1:]])
"""


@pytest.mark.parametrize("place", ["hf_mps.finetune.report.plot.draw", "hf_mps.finetune.report.card"])
def test_a_run_counts_as_finished_once_all_is_written(
    place: str, desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(_: object) -> None:
        assert not (desk / "runs/my/results.json").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(place, stopped)
        assert finetune("my.yaml", "training.max_steps=2").code == 130
    assert finetune("my.yaml", "training.max_steps=2").code == 0
    assert (desk / "runs/my/README.md").is_file()
    assert not (desk / "runs/my/.results.json").exists()
