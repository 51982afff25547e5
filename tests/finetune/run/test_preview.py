"""`--plan`: all that a run would decide, with reasons, and nothing done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest
from inline_snapshot import snapshot
from transformers import AutoModelForSequenceClassification

from hf_mps.finetune.run import stages
from tests.finetune.run_files import results
from tests.finetune.tiny import Command


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training of the recipe's own is a failure of the test."""

    monkeypatch.setattr(stages, "train", Mock(side_effect=AssertionError("trained")))


def test_a_plan_tells_every_choice_of_the_run_and_does_nothing(desk: Path, finetune: Command, untrained: None) -> None:
    before = sorted(path.name for path in desk.iterdir())
    ended = finetune("my.yaml", "--plan").finished()
    lines = ended.out.splitlines()
    assert lines[0] == "hf_mps plan of my"
    names = [line[2:].partition("  ")[0] for line in lines[1:]]
    assert names[:7] == ["model", "data", "device", "precision", "batch", "lengths", "steps"]
    assert {"optimizer", "output", "parameters", "memory", "operators", "launches"} <= set(names)
    assert sorted(path.name for path in desk.iterdir()) == before


def test_a_plan_as_json_has_what_a_program_wants(desk: Path, finetune: Command, untrained: None) -> None:
    ended = finetune("my.yaml", "--plan", "--json", "training.gradient_accumulation_steps=2").finished()
    said = json.loads(ended.out)
    assert said["choices"]["device"]["value"] == "mps"
    assert said["simulated"] is True
    assert "(simulated)" in said["choices"]["device"]["reason"]
    assert said["choices"]["steps"] == {"value": 3, "reason": snapshot("1 epoch of 3, for 48 rows")}
    assert said["recipe"]["training"]["gradient_accumulation_steps"] == 2
    # Two layers of 32, 17 words, 64 positions, two parts, a pooler and the head: counted from the saved model.
    model = AutoModelForSequenceClassification.from_pretrained(desk / "model", num_labels=2)
    assert said["parameters"] == {"trainable": model.num_parameters(), "frozen": 0}
    assert said["buckets"] == sorted(said["buckets"])
    assert all(choice["reason"] for choice in said["choices"].values())
    assert said["choices"]["launches"]["reason"].startswith("of a step as the plain Trainer makes it, before")


def test_the_plan_is_the_runs_own_header(desk: Path, finetune: Command) -> None:
    said = json.loads(finetune("my.yaml", "--plan", "--json").out)["choices"]
    assert finetune("my.yaml").code == 0
    ran = results(desk / "runs/my")["choices"]
    assert said["output"]["value"] == "runs/my"
    assert ran["output"]["value"] == "my"  # results.json goes out with the model: no folders of this machine
    ran["output"] = said["output"]
    ran["memory"] = said["memory"]  # a plan traces a step, a run only where it could be too large
    assert {name: said[name] for name in ran} == ran
    assert set(said) - set(ran) == {"parameters", "operators", "launches"}


def test_a_plan_says_when_another_number_of_processes_goes_on(desk: Path, finetune: Command) -> None:
    words = ("my.yaml", "training.save_strategy=steps", "training.save_steps=3")
    assert finetune(*words).code == 0
    run = desk / "runs/my"
    (run / "results.json").unlink()  # as if it had been stopped
    state = run / "checkpoint-3" / "trainer_state.json"
    stored = json.loads(state.read_text(encoding="utf-8"))
    stored["stateful_callbacks"]["Shares"]["attributes"] |= {"processes": 2, "batch": 4}
    state.write_text(json.dumps(stored), encoding="utf-8")
    for other in {*run.glob("checkpoint-*")} - {state.parent}:
        shutil.rmtree(other)
    said = json.loads(finetune(*words, "--plan", "--json").out)["choices"]
    assert (said["processes"]["value"], said["batch"]["value"]) == (1, 4)
    assert said["processes"]["reason"] == (
        "the run began in 2 processes, with 8 rows in a step; each has 2 batches of 4 now, so that the same rows are"
        " left; random draws (dropout) are others"
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("load_best_model_at_end=true", "save_strategy=no"),
            "training: transformers refuses it: --load_best_model_at",
        ),
        (("optim=lomo",), "training.optim=lomo: refused: You need to install `lomo_optim`"),
        (("metric_for_best_model=nope",), "training.metric_for_best_model is 'nope'; allowed: f1, accuracy, loss"),
    ],
)
def test_a_plan_refuses_what_a_run_would(finetune: Command, desk: Path, words: tuple[str, ...], line: str) -> None:
    ended = finetune("my.yaml", "--plan", *(f"training.{word}" for word in words))
    assert ended.out == ""
    assert ended.refused().startswith(line)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--json",), "--json works only with --plan; a run writes results.json into its folder"),
        (("--plan", "--smoke"), "--plan cannot be combined with --smoke; give one of them"),
    ],
)
def test_options_that_do_not_go_together(desk: Path, finetune: Command, words: tuple[str, ...], line: str) -> None:
    assert finetune("my.yaml", *words).refused() == f"{line}"
