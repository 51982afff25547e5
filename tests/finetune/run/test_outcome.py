"""What a task and a recipe may ask of the runner beyond a plain training, each seen in the files of a run."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import Seq2SeqTrainingArguments, Trainer

from hf_mps.finetune.tasks.text_classification import TextClassification
from hf_mps.metal.fallback.accounting import MetalFallbackWarning
from hf_mps.tools.export.make import chosen
from tests.finetune.run_files import predictions, results
from tests.finetune.tiny import Command

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Fields of Prepared that the task hands to the runner in the next run, in place of its own."""
    fields: dict[str, Any] = {}
    prepare = TextClassification.prepare

    def prepared(*arguments: Any) -> Any:
        made = prepare(*arguments)
        for name, value in fields.items():
            setattr(made, name, value)
        return made

    monkeypatch.setattr(TextClassification, "prepare", prepared)
    return fields


def test_predictions_and_pictures_are_written_and_named_everywhere(
    desk: Path, finetune: Command, handed: dict[str, Any]
) -> None:
    seen: list[Any] = []

    def predict(trainer: Any) -> Iterator[dict[str, Any]]:
        for row in trainer.predict(trainer.eval_dataset).label_ids.tolist():
            yield {"label": row, "words": ["a", "b, c"]}

    def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, bytes]:
        seen.extend(rows)
        return {"some_picture.png": PNG}

    handed |= {"predict": predict, "figures": figures, "snippet": 'load(".")'}
    ended = finetune("my.yaml").finished()
    run = desk / "runs" / "my"
    rows = predictions(run)
    assert len(rows) == len(seen) == 16
    assert {row["label"] for row in rows} == {"0", "1"}
    assert json.loads(rows[0]["words"]) == ["a", "b, c"]
    assert (run / "some_picture.png").read_bytes() == PNG
    assert (results(run)["predictions"], results(run)["pictures"]) == ("predictions.csv", ["some_picture.png"])
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "[predictions.csv](predictions.csv)" in card
    assert "![Some picture](some_picture.png)" in card
    assert 'load(".")\n```' in card
    assert "runs/my, with results.json, training.png, README.md, predictions.csv, some_picture.png\n" in ended.out


def test_a_tasks_own_trainer_arguments_and_saving_are_used(
    desk: Path, finetune: Command, handed: dict[str, Any]
) -> None:
    class Own(Trainer):
        def __init__(self, *arguments: Any, flavour: str, **settings: Any) -> None:
            super().__init__(*arguments, **settings)
            self.flavour = flavour

    def save(trainer: Any, folder: Path) -> None:
        (folder / "own.txt").write_text(f"{trainer.flavour} {type(trainer.args).__name__}", encoding="utf-8")

    handed |= {"trainer": Own, "arguments": Seq2SeqTrainingArguments, "trainer_settings": {"flavour": "vanilla"}}
    handed |= {"arguments_defaults": {"learning_rate": 1.0, "weight_decay": 0.25}, "save": save}
    assert finetune("my.yaml").code == 0
    run = desk / "runs" / "my"
    assert (run / "own.txt").read_text(encoding="utf-8") == "vanilla Seq2SeqTrainingArguments"
    assert not (run / "config.json").exists()
    # The task's wish where the recipe says nothing, the recipe's word where it does.

    arguments = torch.load(run / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert (arguments.learning_rate, arguments.weight_decay) == (5e-3, 0.25)


def test_further_splits_are_measured_once_after_training(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finetune("my.yaml", "data.files.train=train.csv", "data.files.other=dev.csv").code == 0
    said = results(desk / "runs/my")
    assert said["metrics"]["other_f1"] == said["metrics"]["f1"]
    assert not [name for name in said["metrics"] if name.endswith(("runtime", "per_second"))]
    assert len([entry for entry in said["log_history"] if "other_f1" in entry]) == 1


def test_a_fallback_that_the_recipe_names_is_expected_and_another_is_not(
    desk: Path, finetune: Command, handed: dict[str, Any]
) -> None:

    def falls_back(evaluated: Any) -> dict[str, float]:
        scores = torch.tensor(evaluated.predictions).to("mps")
        torch.mode(scores)  # it has no Metal kernel
        return {"f1": 0.0, "accuracy": 0.0}

    handed["compute_metrics"] = falls_back
    # A warning of each operator is given once in a process: the named one is to be silent at its first call.
    with warnings.catch_warnings():
        warnings.simplefilter("error", MetalFallbackWarning)
        named = finetune("my.yaml", "fallback=[aten::mode]", "output_dir=named")
        assert named.code == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MetalFallbackWarning)
        ended = finetune("my.yaml")
        assert ended.code == 0
    assert results(desk / "runs/my")["unexpected_fallback"] == ["aten::mode"]
    assert "unexpected  aten::mode ran on the CPU" in ended.out
    said = results(desk / "named")
    assert ([entry["operator"] for entry in said["fallback"]], said["unexpected_fallback"]) == (["aten::mode"], [])
    assert "aten::mode, as the recipe names them" in named.out
    reason = results(desk / "named")["choices"]["on_the_cpu"]["reason"]
    assert "they have no Metal kernel, and the recipe names them: no warning" in reason
    ended = finetune("my.yaml", "fallback=[mode]")
    allowed = "operators as PyTorch writes them, such as aten::_ctc_loss"
    assert ended.err == f"hf-mps: command line: fallback has 'mode'; allowed: {allowed}\n"


def test_a_run_stops_early_and_keeps_the_best(desk: Path, finetune: Command, handed: dict[str, Any]) -> None:
    scores = iter([0.5, 0.75, 0.5, 0.5, 0.9])
    handed["compute_metrics"] = lambda _: {"f1": next(scores), "accuracy": 0.0}
    finetune("my.yaml", "early_stopping_patience=2", "training.num_train_epochs=5").finished()
    said = results(desk / "runs/my")
    assert [entry["eval_f1"] for entry in said["log_history"] if "eval_f1" in entry] == [0.5, 0.75, 0.5, 0.5]
    assert said["metrics"]["f1"] == 0.75
    assert said["choices"]["kept_model"]["value"] == "best by f1"
    assert said["choices"]["early_stopping"]["value"] == snapshot("after 2 evaluations without a better f1")


def test_a_tracker_that_is_not_installed_or_not_known_is_refused(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "training.report_to=swanlab").refused() == snapshot(
        "training.report_to=swanlab: it is not installed; next: pip install swanlab"
    )
    ended = finetune("my.yaml", "training.report_to=[wanbd]")
    assert ended.code == 2
    assert ended.err.startswith("hf-mps: training.report_to is 'wanbd'; allowed: none, all, ")
    assert ended.err.endswith("; did you mean 'wandb'?\n")


def test_a_tracker_that_is_installed_gets_what_trainer_logs(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRC32C_SW_MODE", "auto")  # tensorboardX sets it when it is first imported
    assert finetune("my.yaml", "training.report_to=tensorboard").code == 0
    assert list((desk / "runs/my").rglob("events.out.tfevents.*"))


def test_a_token_is_neither_taken_nor_shown(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "training.hub_token=hf_secret")
    assert ended.code == 2
    assert "hf_secret" not in ended.out + ended.err
    assert finetune("my.yaml", "training.push_to_hub=true").refused() == snapshot(
        "command line: training.push_to_hub is not set here: the runner keeps its files here; next, after the"
        " run: hf-mps push OUTPUT_DIR OWNER/NAME"
    )
    assert not (desk / "runs").exists()
    ended = finetune("my.yaml", "training.max_steps=1")
    assert "  hf-mps push runs/my OWNER/NAME\n" in ended.out


def test_what_a_push_sends_names_no_home_folder_user_or_host(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = desk / "Users" / "jane-doe-of-example"
    shutil.copytree(desk, home / "desk", ignore=shutil.ignore_patterns("Users"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USER", home.name)
    monkeypatch.setattr("platform.node", lambda: f"{home.name}-mac.local")
    words = [f"output_dir={home}/runs/my", f"data.train={home}/desk/train.csv", "training.max_steps=1"]
    assert finetune(f"{home}/desk/my.yaml", *words).code == 0
    run = home / "runs" / "my"
    assert home.name.encode() in (run / "training_args.bin").read_bytes()  # the pickle that would tell
    sent = chosen(run).files
    assert {"README.md", "results.json", "model.safetensors"} <= set(sent)
    assert [name for name in sent if home.name.encode() in (run / name).read_bytes()] == []
