"""A run that computes with a release's own Metal kernels: the same metrics, told as such, resumed as any other."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.finetune.run_files import results
from tests.finetune.tiny import Command
from tests.metal.kernels.conftest import RELEASE, fetched
from tests.metal.kernels.launch.conftest import running

WORDS = ("training.num_train_epochs=2", "training.logging_steps=1")
TOLD = f"computing with torch {RELEASE}'s own Metal kernels"


def history(run: Path) -> list[dict[str, Any]]:
    """The losses and scores of a run, without timings."""
    kept = ("step", "loss", "eval_loss", "eval_f1", "learning_rate")
    entries = (entry for entry in results(run)["log_history"] if "train_runtime" not in entry)
    return [{key: entry[key] for key in kept if key in entry} for entry in entries]


@pytest.fixture
def kernels() -> Iterator[str]:
    """A release's kernels run while the test does."""
    with running(fetched(RELEASE)):
        yield RELEASE


def without_dropout(model: Path) -> None:
    """Leave nothing that draws random numbers: a Mac's stream is another than the CPU's."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")


def test_the_metrics_are_those_of_a_run_without_and_its_files_say_what_ran(desk: Path, finetune: Command) -> None:
    without_dropout(desk / "model")
    assert finetune("my.yaml", *WORDS, "output_dir=without").code == 0
    with running(fetched(RELEASE)):
        ended = finetune("my.yaml", *WORDS, "output_dir=with")
    assert (ended.code, ended.err) == (0, "")
    plain, own = results(desk / "without"), results(desk / "with")
    assert TOLD in own["device"]["reason"]
    assert TOLD not in plain["device"]["reason"]
    assert plain["metal_kernels"] is None
    assert own["metal_kernels"]["release"] == RELEASE
    assert own["metal_kernels"]["share"] > 0.85
    assert f"## Metal kernels\n\n{own['metal_kernels']['launches']:,} of " in (desk / "with/README.md").read_text()
    assert own["metrics"] == pytest.approx(plain["metrics"], abs=1e-3)
    for one, other in zip(history(desk / "without"), history(desk / "with"), strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    assert own["fallback"] == plain["fallback"]


def test_a_stopped_run_goes_on_to_the_same_end(
    desk: Path, finetune: Command, stop: Callable[[int, int], None], kernels: str
) -> None:
    assert finetune("my.yaml", *WORDS, "output_dir=whole").code == 0
    stop(4, signal.SIGINT)
    assert finetune("my.yaml", *WORDS).code == 130
    ended = finetune("my.yaml", *WORDS).finished()
    assert "this recipe's run goes on from checkpoint-4" in ended.out
    assert history(desk / "runs/my") == history(desk / "whole")
    assert results(desk / "runs/my")["metal_kernels"]["release"] == kernels


@pytest.mark.nightly
@pytest.mark.slow
def test_the_quickstarts_metrics_are_those_of_a_run_without(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = torch.nn.Dropout.__init__
    monkeypatch.setattr(torch.nn.Dropout, "__init__", lambda self, p=0.5, inplace=False: made(self, 0.0, inplace))
    words = ("quickstart", "training.max_steps=6", "data.rows={train: 128, validation: 64}")
    assert finetune(*words, "output_dir=without").code == 0
    with running(fetched(RELEASE)):
        assert finetune(*words, "output_dir=with").code == 0
    plain, own = results(desk / "without"), results(desk / "with")
    assert TOLD in own["device"]["reason"]
    assert own["metrics"] == pytest.approx(plain["metrics"], abs=1e-3)
    assert own["metal_kernels"]["share"] > 0.85
