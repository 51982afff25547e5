"""Every hazard shows without its guard, in each loop that people use, and with its guard the result is right."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_mps.core import notices
from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.layer.guards.catalogue import GUARDS
from hf_mps.layer.guards.numerics.checkpoint_rng import CheckpointRng
from hf_mps.metal.simulator import strictness
from tests import hazards, share
from tests.layer.guards import loops
from tests.layer.guards.experiments import EXPERIMENTS, Experiment

# The workers' server imports transformers; torch.compile traces a whole model; Lightning looks for a batch size twice.
SLOW = ("workers_of_trainer", "compiled_trainer", "flex_attention", "lightning_batch_size")
MARKS = {name: pytest.mark.slow if share.has(name, 6) else pytest.mark.nightly for name in SLOW}
MARKS |= dict.fromkeys(("workers_of_an_evaluation", "compiled_accelerator"), pytest.mark.nightly)
# Those that are there without being switched on: in older libraries, and in the default profile's chip and torch.
OF_LIBRARIES = (
    "non-blocking",
    "expanded-operands",
    "sliced-products",
    "permuted-activations",
    "lstm-dropout",
    "cuda-graphs",
    "large-k",
    "atomic-order",
    "conv-batch",
    "large-pad",
    "lerp-weight",
    "lone-scans",
    "index-add-gaps",
    "dtype-copies",
    "mixed-dtypes",
    "index-range",
    "half-precision",
    "oom-text",
    "resume-epoch",
)
# Older systems refuse tiled bmm, and convolutions with a size above 65,536; linear layers go to MPSGraph there.
SINCE = {
    "huge-products": pytest.mark.macos(15),
    "conv-batch": pytest.mark.macos(15, 1),
    "linear-bias": pytest.mark.macos(15),
}


def _marks(name: str, experiment: Experiment) -> list[pytest.MarkDecorator]:
    found = (MARKS.get(experiment.__name__), SINCE.get(name), hazards.armed(name))
    return [mark for mark in found if mark is not None]


TABLE = [
    pytest.param(name, experiment, id=f"{name}: {experiment.__name__}", marks=_marks(name, experiment))
    for name, experiments in EXPERIMENTS.items()
    for experiment in experiments
]


# What these do leaves something for a person to know or to do (hf_mps/layer/guards/base.py); all others are silent.
SPEAKING = {
    "attention",
    "compile",
    "cuda-graphs",
    "float64-columns",
    "memory-budget",
    "shape-growth",
    "torn-checkpoint",
}


# Those of one trial of one kernel.
TRIED = ("non-contiguous", "lstm-dropout", "mixed-dtypes")


def test_every_guard_has_a_row() -> None:
    assert set(EXPERIMENTS) == set(GUARDS.names)
    assert all(EXPERIMENTS.values())
    assert set(hazards.HAZARDS) <= set(GUARDS.names)


@pytest.mark.rotated(": ")  # of each guard's experiments one, all of them each night
@pytest.mark.parametrize(("name", "experiment"), TABLE)
def test_wrong_without_the_guard_and_right_with_it(name: str, experiment: Experiment, tmp_path: Path) -> None:
    with hazards.on(name) if name in hazards.HAZARDS else nullcontext():
        with guards.suspended(name):
            assert not experiment(tmp_path / "without"), "the hazard does not show"
        guards.get(name).forget()
        assert experiment(tmp_path / "with"), "the guard does not help"
        assert guards.get(name).lines, "the guard does not say what it did"
        assert not any("\n" in line for line in guards.get(name).lines)
        aloud = [line for line in notices._said if f"({name}: " in line]
        assert name in SPEAKING or not aloud, "a cure that needs nobody speaks"


@pytest.mark.rotated
@pytest.mark.parametrize("name", [pytest.param(name, marks=SINCE.get(name, ())) for name in hazards.HAZARDS])
def test_nothing_is_left_of_a_hazard(name: str, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name][0]
    with guards.suspended(name):
        # An older library may have the fault by itself; the device has none.
        before = experiment(tmp_path / "before") if name in OF_LIBRARIES else True
    with hazards.on(name):
        assert hazards.active() == {name}
    assert not hazards.active()
    with guards.suspended(name):
        assert experiment(tmp_path / "after") is before, "the device is not what it was"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=hazards.armed(name))
        for name in (*TRIED, "conv-batch", "conv3d-layout", "large-pad", "index-add-gaps")
    ],
)
def test_a_trial_on_the_device_tells_whether_the_fault_is_there(name: str) -> None:
    with strictness.off():
        found = guards.get(name).trial()
    assert not found.value
    assert found.reason.startswith("tried on the device: ")
    with hazards.on(name):
        assert guards.get(name).applies().value


def test_without_the_fault_nothing_is_done(tmp_path: Path) -> None:
    for name in TRIED:
        with strictness.off():
            assert all(experiment(tmp_path) for experiment in EXPERIMENTS[name])
        assert not guards.get(name).times
    states = {state.name: state.state for state in guards.report().guards}
    assert states["non-contiguous"] == "needless"


@hazards.armed("non-contiguous")
def test_frozen_weights_are_made_contiguous_too() -> None:
    layer = nn.Linear(3, 4).requires_grad_(False)
    layer.weight.data = layer.weight.data.T.contiguous().T
    with hazards.on("non-contiguous"):
        assert loops.new_accelerator().prepare_model(layer).weight.is_contiguous()


def test_the_dispatcher_has_its_former_kernels_after_a_hazard() -> None:
    before = torch._C._dispatch_dump("aten::addcdiv_")
    with hazards.on("non-contiguous", "non-blocking"):
        assert torch._C._dispatch_dump("aten::addcdiv_") != before
        assert hazards.active() == {"non-contiguous", "non-blocking"}
    assert torch._C._dispatch_dump("aten::addcdiv_") == before
    assert not hazards.active()


def test_a_name_that_is_no_hazard_is_refused_with_the_nearest() -> None:
    with (
        pytest.raises(UserError, match=r"lstm-dropot is no hazard; .*did you mean 'lstm-dropout'"),
        hazards.on("lstm-dropot"),
    ):
        pass


def test_names_that_torch_has_itself_are_left_alone() -> None:
    guard = CheckpointRng()  # finds what the guard of this process put there, as if it were torch's
    guard.install(torch)
    guard.switched(False)
    assert hasattr(torch.mps, "_initialized")
    assert hasattr(torch.mps, "device")


def test_a_storage_that_is_moved_is_no_checkpoint_that_is_replayed() -> None:
    guards.get("checkpoint-rng").verdict()
    torch.ones(4).untyped_storage().to(device=torch.device("mps"))
    assert not guards.get("checkpoint-rng").times
    x = torch.ones(4, device="mps", requires_grad=True)
    torch.utils.checkpoint.checkpoint(torch.nn.functional.dropout, x, use_reentrant=False).sum().backward()
    assert guards.get("checkpoint-rng").times
