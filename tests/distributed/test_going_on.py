"""A run of two processes that is killed at any moment goes on and ends, to the last bit, as one never killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from hf_mps.core import checkpoint_files
from hf_mps.finetune.run.run_dir import STATE
from tests.distributed.test_faults import carried_out, said
from tests.finetune.run_files import results

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "darwin", reason="a forked process cannot use a Mac's own device"),
]
WORDS = ("my.yaml", "training.save_strategy=steps", "training.save_steps=4", "training.logging_steps=1")
TWO = (*WORDS, "training.num_train_epochs=3")
KILLS = {
    "a rank in a step": "SIGKILL@step 6@1",
    "the main rank as it writes": "SIGKILL@write 6@0",
    "the main rank as it renames": "SIGKILL@write 14@0",
    "a rank as it writes": "SIGKILL@write 2@1",
    "all in a step": "SIGKILL@step 7",
    "a full disk at one": "FULL@write 1@1",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs: `whole`, and one for each kill, gone on with."""
    folder = tmp_path_factory.mktemp("going-on")
    plan: dict[str, Any] = {"whole": parts("whole", ["none@never"])}
    plan |= {name: parts(name, [fault, "none@never"]) for name, fault in KILLS.items()}
    carried_out(plan, folder)
    return folder


def parts(name: str, faults: list[str], ranks: int = 2, words: tuple[str, ...] = TWO) -> list[dict[str, Any]]:
    """One run's parts, each with its fault."""
    output = f"output_dir={name.replace(' ', '-')}"
    return [{"ranks": ranks, "fault": fault, "words": [*words, output]} for fault in faults]


def end(run: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """A run's weights, bit by bit, and what it logged, without timings."""
    kept = ("step", "loss", "grad_norm", "learning_rate", "eval_loss", "eval_f1")
    logs = [{key: entry[key] for key in kept if key in entry} for entry in results(run)["log_history"]]
    weights = {name: value.tobytes() for name, value in load_file(run / "model.safetensors").items()}
    return weights, [entry for entry in logs if len(entry) > 1]


@pytest.mark.parametrize("name", KILLS)
def test_it_ends_as_the_run_that_was_never_killed(name: str, place: Path) -> None:
    first, second = json.loads((place / f"{name}.json").read_text())
    assert 0 not in first["codes"]
    assert second["codes"] == [0, 0], second["texts"]
    assert end(place / name.replace(" ", "-")) == end(place / "whole")


@pytest.mark.parametrize("name", KILLS)
def test_no_checkpoint_is_torn_and_nothing_is_left(name: str, place: Path) -> None:
    run = place / name.replace(" ", "-")
    for folder in run.glob("checkpoint-*"):
        assert checkpoint_files.torn(folder, STATE) is None
        assert {file.name for file in folder.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert not list(run.glob(".*"))


def test_the_rank_that_could_not_write_is_named(place: Path) -> None:
    first, _ = json.loads((place / "a full disk at one.json").read_text())
    (line,) = said(first)
    assert line.startswith("hf-mps: rank 1 on HOST: no space is left on the disk")
