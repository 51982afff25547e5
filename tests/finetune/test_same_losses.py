"""The same rows a step on one, two and four processes: the same losses, metrics and predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_mps.cli.main import main
from tests.distributed.launching import python
from tests.finetune import several
from tests.finetune.run_files import predictions

pytestmark = pytest.mark.together
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
    return json.loads((folder / f"{name}-{processes}" / "results.json").read_text(encoding="utf-8"))


def losses(outcome: dict[str, Any]) -> list[float]:
    return [entry["loss"] for entry in outcome["log_history"] if "loss" in entry]


def said(run: Path) -> list[dict[str, Any]]:
    """A run's predictions, numbers as such; words, and the count of those above zero, left out: rounding moves it."""
    left_out = ("words", "active_dims")

    def read(value: str) -> Any:
        try:
            return float(value)
        except ValueError:
            return value

    return [{name: read(value) for name, value in row.items() if name not in left_out} for row in predictions(run)]


PAIRS = [(name, processes) for processes in PROCESSES[1:] for name in several.trained_by(processes)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [pair for pair in PAIRS if pair[0] != "masks"])
def test_losses_are_those_of_one_process(trained: Path, name: str, processes: int) -> None:
    """Of the steps that the rows fill: packed rows leave a last one that several processes fill up with repeats.

    A SegFormer has a batch norm, whose statistics are of each process's own rows.
    """
    alone, together = (losses(outcome(trained, name, count)) for count in (1, processes))
    whole = len(alone) - (name == "packed")
    assert whole >= 2
    assert together[:whole] == pytest.approx(alone[:whole], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "processes"), [pair for pair in PAIRS if pair[0] not in ("packed", "masks")])
def test_evaluations_and_predictions_are_of_exactly_the_validation_rows(
    trained: Path, name: str, processes: int
) -> None:
    alone, together = (outcome(trained, name, count) for count in (1, processes))
    # Words whose weight is above zero: rounding lifts one over it, or not.
    dims, others = (one["metrics"].pop("active_dims", 0.0) for one in (alone, together))
    assert others == pytest.approx(dims, rel=1e-2)
    assert together["metrics"] == pytest.approx(alone["metrics"], rel=1e-6, abs=1e-5)
    before, after = (one["baseline"].pop("metrics") for one in (alone, together))
    assert after == pytest.approx(before, abs=1e-6)
    assert together["baseline"] == alone["baseline"]
    here, there = (said(trained / f"{name}-{count}") for count in (1, processes))
    assert len(here) == len(there)
    for one, other in zip(here, there, strict=True):
        largest = max((abs(value) for value in one.values() if isinstance(value, float)), default=0.0)
        assert other == pytest.approx(one, abs=max(2e-4, 1e-4 * largest))  # the last digits that are written


@pytest.mark.slow
@pytest.mark.skipif("masks" not in several.BY_TWO, reason="another commit's share of the recipes")
def test_every_process_measures_the_statistics_of_a_batch_norm_that_are_saved(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(trained)
    capfd.readouterr()
    assert main(["evaluate", "masks-2", "--json"]) == 0
    measured = json.loads(capfd.readouterr().out)["splits"]["validation"]["metrics"]
    assert measured == pytest.approx(outcome(trained, "masks", 2)["metrics"], abs=1e-5)
