"""A resumed run is the unbroken one as far as the device can say: decided by running the unbroken one twice.

Where two unbroken runs are equal to the bit the resumed one is too, and where they differ (Metal adds in any order, as
in an embedding's backward) it differs no more than they do. So it can be asked of a Mac's own device as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from torch import Tensor

from hf_mps.layer import guards
from hf_mps.metal import simulator
from hf_mps.metal.simulator import strictness
from tests.layer.guards import loops
from tests.layer.guards.experiments.order import deterministic

SETTINGS = {"num_train_epochs": 3, "save_strategy": "steps", "save_steps": 5, "learning_rate": 1e-3}
UNBROKEN = 3
MORE = 10
"""Runs are few, and what they differ by is drawn anew: a resumed one may lie this much further away."""


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    """The largest difference of two weights."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def unbroken(folder: Path) -> list[Tensor]:
    return loops.trained(folder, model=loops.bert(0.3), **SETTINGS)


def resumed(folder: Path) -> list[Tensor]:
    rest = loops.trainer(folder.with_name("rest"), model=loops.bert(0.3), **SETTINGS)
    rest.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    return loops.weights(rest.model)


@contextmanager
def order(of: str) -> Iterator[None]:
    """A device that adds in one order, in any, or in any where the program asks for one; a Mac is as it is."""
    simulated = simulator.loaded() is not None
    switch = strictness.off if of == "one" else strictness.on
    with (
        switch("atomic-order") if simulated else nullcontext(),
        deterministic(warn_only=not simulated) if of == "asked for" else nullcontext(),
    ):
        yield


@pytest.mark.parametrize("of", ["one", "any", "asked for"])
def test_a_resumed_run_is_as_near_to_an_unbroken_one_as_those_are_to_each_other(of: str, tmp_path: Path) -> None:
    with order(of):
        runs = [unbroken(tmp_path / str(number)) for number in range(UNBROKEN)]
        again = resumed(tmp_path / "0")
        with guards.suspended("resume-rng"):
            without = resumed(tmp_path / "0")
    spread = max(distance(runs[0], other) for other in runs[1:])
    if simulator.loaded() is not None:
        assert (spread > 0) is (of == "any")
    assert distance(runs[0], again) <= MORE * spread
    assert distance(runs[0], without) > max(MORE * spread, 1e-6), "another run would not be noticed"
