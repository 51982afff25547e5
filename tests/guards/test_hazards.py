"""Every hazard shows without its guard, in each loop that people use, and with its guard the result is right."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from hf_mps import guards
from hf_mps.simulator import hazards
from tests.guards.experiments import EXPERIMENTS, Experiment

TABLE = [
    pytest.param(name, experiment, id=f"{name}: {experiment.__name__}")
    for name, experiments in EXPERIMENTS.items()
    for experiment in experiments
]


@pytest.mark.parametrize(("name", "experiment"), TABLE)
def test_wrong_without_the_guard_and_right_with_it(name: str, experiment: Experiment, tmp_path: Path) -> None:
    with hazards.on(name) if name in hazards.HAZARDS else nullcontext():
        with guards.suspended(name):
            assert not experiment(tmp_path / "without"), "the hazard does not show"
        guards.get(name).forget()
        assert experiment(tmp_path / "with"), "the guard does not help"


@pytest.mark.parametrize("name", [name for name in hazards.HAZARDS if name in EXPERIMENTS])
def test_nothing_is_left_of_a_hazard(name: str, tmp_path: Path) -> None:
    with hazards.on(name):
        assert hazards.active() == {name}
    assert not hazards.active()
    with guards.suspended(name):
        assert EXPERIMENTS[name][0](tmp_path), "the device is not what it was"
