"""With a fault of Metal switched on and its guard off, parity names the module that is wrong; without, all agree."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_mps.layer import guards
from hf_mps.tools.dryrun.parity.compare import Parity
from tests import hazards
from tests.tools.dryrun.parity.runs import Classifier, batches, held


def frozen(folder: Path) -> Parity:
    return held(Classifier(frozen=True), batches((4, 6), (4, 6)), folder)


def transposed(folder: Path) -> Parity:
    model = Classifier()
    weight = model.layer[0].weight
    weight.data = weight.data.T.contiguous().T
    return held(model, batches((4, 6), (4, 6)), folder)


def mixed(folder: Path) -> Parity:
    model = Classifier()
    nn.init.uniform_(model.norm.weight)
    model.words.to(torch.bfloat16)
    model.layer.to(torch.bfloat16)
    return held(model, batches((4, 6)), folder, "bf16")


def large(folder: Path) -> Parity:
    return held(Classifier(width=16), batches((4, 6), (4100, 8)), folder)


FOUND: dict[str, tuple[Callable[[Path], Parity], int, str, str]] = {
    "frozen-norm": (frozen, 1, "gradient", "norm"),
    "non-contiguous": (transposed, 1, "update", "layer.0"),
    "mixed-dtypes": (mixed, 1, "forward", "norm"),
    "large-k": (large, 2, "gradient", "layer.0"),
}


@pytest.mark.parametrize("name", FOUND)
def test_the_module_that_a_fault_makes_wrong_is_named(name: str, tmp_path: Path) -> None:
    run, step, what, module = FOUND[name]
    with hazards.on(name), guards.suspended():
        found = run(tmp_path)
    assert not found.same
    assert (found.divergence.step, found.divergence.what, found.divergence.module) == (step, what, module)
    assert found.divergence.rel_error > found.tolerance.value


@pytest.mark.parametrize("name", FOUND)
def test_without_the_fault_nothing_differs(name: str, tmp_path: Path) -> None:
    found = FOUND[name][0](tmp_path)
    assert found.same, found
    assert found.divergence is None
    assert all(step.rel_error < found.tolerance.value for step in found.steps)


@hazards.armed("non-contiguous")
def test_a_fault_that_a_guard_mends_is_not_found(tmp_path: Path) -> None:
    guards.get("non-contiguous").forget()
    with hazards.on("non-contiguous"):
        assert transposed(tmp_path).same
    guards.get("non-contiguous").forget()
