"""The same rows a step on one, two and four processes: the same losses, metrics and predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launching import python
from tests.finetune import several

PROCESSES = several.WORLDS
WORKER = Path(several.__file__)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which each of the recipes was trained by one, two and four processes."""
    folder = tmp_path_factory.mktemp("several")
    several.write(folder)
    ended = python(WORKER, cwd=folder, env={"HF_HOME": str(folder / "cache")}, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return folder


def outcome(folder: Path, name: str, processes: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}-{processes}" / "results.json").read_text(encoding="utf-8"))
    return found


def losses(outcome: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in outcome["log_history"] if "loss" in entry]


@pytest.mark.slow
@pytest.mark.parametrize("name", several.RECIPES)
@pytest.mark.parametrize("processes", PROCESSES[1:])
def test_losses_are_those_of_one_process(trained: Path, name: str, processes: int) -> None:
    """Of the steps that the rows fill: packed rows leave a last one that several processes fill up with repeats."""
    alone, together = (losses(outcome(trained, name, count)) for count in (1, processes))
    whole = len(alone) - (name == "packed")
    assert whole >= 3
    assert together[:whole] == pytest.approx(alone[:whole], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in several.RECIPES if name != "packed"])
def test_evaluations_and_predictions_are_of_exactly_the_validation_rows(trained: Path, name: str) -> None:
    alone, *others = (outcome(trained, name, count) for count in PROCESSES)
    for together in others:
        assert together["metrics"] == pytest.approx(alone["metrics"], abs=1e-5)
        assert together["baseline"] == alone["baseline"]
    files = {(trained / f"{name}-{count}" / "predictions.csv").read_text(encoding="utf-8") for count in PROCESSES}
    assert len(files) == 1
