"""Guards meet the faulty Metal kernels that they are for: wrong without the guard, right with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hf_mps.core.releases import torch_release
from hf_mps.layer import guards
from hf_mps.layer.fused_step import fused_dropout
from hf_mps.metal.simulator import strictness
from tests import hazards
from tests.layer.guards.experiments import Experiment, results
from tests.metal.kernels.launch.conftest import running

DROPOUT = "dropout_fwd_float" if torch_release() >= fused_dropout.STOCK_FUSES else "bernoulli_scalar_float"
"""What the plain dropout of the installed torch launches."""
FAULTY = [
    ("mixed-dtypes", "2.13.0", results.float32_norms, "layer_norm_single_row_bfloat"),
    ("mixed-dtypes", "2.13.0", results.frozen_float32_norms, "layer_norm_single_row_bfloat"),
    ("checkpoint-rng", "2.13.0", results.checkpointed_gradients, DROPOUT),
]
"""The guard, a release with the fault, what a person would see, and the kernel that shows it."""


@pytest.fixture
def fetched(release: str, untouched: None) -> None:
    """The release is there, and the guards have done nothing yet."""


def _named(row: object) -> str:
    return row.__name__ if isinstance(row, Callable) else str(row)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "version", "experiment", "kernel"),
    [pytest.param(*row, marks=hazards.armed(row[0])) for row in FAULTY],
    ids=_named,
)
def test_wrong_without_the_guard_and_right_with_it(
    fetched: None, name: str, version: str, experiment: Experiment, kernel: str, tmp_path: Path
) -> None:
    with running(version) as kernels, strictness.off():
        with guards.suspended(name):
            assert not experiment(tmp_path / "without"), "the kernel has no fault"
        assert kernels.ledger.kernels[kernel], "the kernel did not run"
        guards.get(name).forget()
        assert experiment(tmp_path / "with"), "the guard does not help"
        assert guards.get(name).lines, "the guard does not say what it did"


@hazards.armed("mixed-dtypes")
@pytest.mark.parametrize(("name", "version"), sorted({row[:2] for row in FAULTY if row[0] != "checkpoint-rng"}))
def test_the_guards_trial_finds_the_fault_in_the_kernel(fetched: None, name: str, version: str) -> None:
    """That of checkpoint-rng lies in torch.mps, whatever the kernels are."""
    with strictness.off():
        assert not guards.get(name).applies().value, "without kernels there is no fault to find"
        with running(version):
            assert guards.get(name).applies().value
