"""Sentinels see wrong trainings whose guards are switched off, and say nothing about the same trainings done right."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest

from hf_mps.layer import guards
from hf_mps.layer.guards import SentinelNotice
from hf_mps.metal.simulator import strictness
from tests import hazards
from tests.layer.guards.sentinels.trainings import SEEN, Training

TABLE = [
    pytest.param(hazard, sentinel, training, id=f"{hazard}: {training.__name__}")
    for hazard, (sentinel, trainings) in SEEN.items()
    for training in trainings
]


def unguarded(hazard: str) -> AbstractContextManager[None]:
    """Without its guard; faults that no guard knows of have none."""
    return guards.suspended(hazard) if hazard in hazards.HAZARDS else nullcontext()


def found() -> list[object]:
    return [each["name"] for each in guards.found()]


@pytest.mark.parametrize(("hazard", "sentinel", "training"), TABLE)
def test_a_hazard_without_its_guard_is_seen(hazard: str, sentinel: str, training: Training, tmp_path: Path) -> None:
    with hazards.on(hazard), unguarded(hazard):
        with pytest.warns(SentinelNotice, match=f"HF_MPS_SENTINELS=-{sentinel} switches it off") as said:
            training(tmp_path)
        assert sum(each.category is SentinelNotice for each in said) == 1
    assert found() == [sentinel]


@pytest.mark.parametrize(("hazard", "sentinel", "training"), TABLE)
def test_the_same_training_on_a_right_device_is_not(
    hazard: str, sentinel: str, training: Training, tmp_path: Path
) -> None:
    with strictness.off(), unguarded(hazard):
        training(tmp_path)
    assert found() == []
