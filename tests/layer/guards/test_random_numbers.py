"""Nothing of this layer draws from, seeds or reorders anybody's random numbers, or shows a warning again."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers.trainer

from hf_mps.layer import guards
from hf_mps.layer.guards.catalogue import GUARDS
from hf_mps.metal import fallback
from hf_mps.metal.device import choice, memory, precision, probe
from hf_mps.metal.fallback import registration
from hf_mps.metrics import scores
from tests import hazards
from tests.layer.guards import lightning_loops, loops, resume_loops

GENERATORS: dict[str, Callable[[], bytes]] = {
    "python": lambda: repr(random.getstate()).encode(),
    "numpy": lambda: repr(numpy.random.get_state(legacy=True)[1].tolist()).encode(),  # type: ignore[index]
    "torch": lambda: torch.get_rng_state().numpy().tobytes(),
    "mps": lambda: torch.mps.get_rng_state().numpy().tobytes(),
}


@contextmanager
def no_draw() -> Iterator[None]:
    """Fail where one of the four generators is another one afterwards."""
    before = {name: state() for name, state in GENERATORS.items()}
    yield
    moved = [name for name, state in GENERATORS.items() if state() != before[name]]
    assert not moved, f"random numbers were drawn from {', '.join(moved)}"


@pytest.fixture(scope="module", autouse=True)
def _libraries() -> None:
    """Every library that a guard knows is imported."""
    import accelerate

    assert accelerate
    assert transformers
    for name in lightning_loops.NAMES:
        lightning_loops.library(name)


@pytest.mark.parametrize(
    ("name", "faulty"),
    [(name, False) for name in GUARDS.names] + [(name, True) for name in GUARDS.names if name in hazards.HAZARDS],
)
def test_a_guard_looks_for_its_fault_without_a_draw(name: str, faulty: bool) -> None:
    with hazards.on(name) if faulty else nullcontext(), no_draw():
        assert guards.get(name).applies().reason


def took_back_and_registered() -> None:
    with registration.suspended():
        pass


def probed_anew() -> None:
    probe._known = None
    assert choice.choose().value == "mps"


def anew() -> None:
    """Every guard looks for its fault as if it never had."""
    for name in GUARDS.names:
        guards.get(name).forget()
    guards.report()


MOMENTS: list[Callable[[], object]] = [
    anew,
    fallback.report,
    probed_anew,
    took_back_and_registered,
    lambda: precision.default("mps"),
    lambda: precision.dtypes("mps"),
    lambda: (memory.total("mps"), memory.recommended("mps"), memory.driver("mps"), memory.current("mps")),
    lambda: torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, device="mps"))]),
    lambda: torch.linalg.eigh(torch.eye(3, device="mps")),  # an operator that runs on the CPU
    lambda: torch.ones(2).to("mps", non_blocking=True),
    lambda: scores.spearmanr([1.0, 2.0, 3.0], [1.0, 1.0, 2.0]),
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_reports_probes_and_registrations_draw_nothing_and_no_warning_comes_again(moment: Callable[[], object]) -> None:
    registry: dict[str, Any] = {}

    def warn() -> None:
        warnings.warn_explicit("said once", UserWarning, "library.py", 1, registry=registry)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        warn()
        filters = list(warnings.filters)
        with no_draw():
            moment()
        warn()
        assert list(warnings.filters) == filters
    assert [str(each.message) for each in shown].count("said once") == 1


IMPORTS = """
import random, sys, numpy
random.seed(1), numpy.random.seed(2)
python, ofnumpy = random.getstate(), numpy.random.get_state()[1].tolist()
import torch
assert random.getstate() == python and numpy.random.get_state()[1].tolist() == ofnumpy, "import torch"
# PyTorch seeds it anew in each process; nothing was drawn since.
assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(torch.initial_seed()).get_state())

def states():
    on_device, on_cpu = torch.mps.get_rng_state().tolist(), torch.get_rng_state().tolist()
    return [random.getstate(), numpy.random.get_state()[1].tolist(), on_cpu, on_device]

from hf_mps.core import import_hooks as watch
def checked(module, who, arm, stock=watch.apply):  # libraries may draw in their own imports; datasets does
    before = states()
    stock(module, who, arm)
    assert states() == before, (module.__name__, who)
watch.apply = checked
for name in ("transformers.trainer", "accelerate", "datasets", "lightning.pytorch"):
    __import__(name)
assert set(watch.applied.values()) == {"on"}, watch.applied
print(len(watch.applied))
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_imports_draw_nothing(run_python: Any) -> None:
    done = run_python("-c", IMPORTS)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20  # the libraries' modules were switched on


def logged(folder: Path) -> tuple[list[float], list[torch.Tensor]]:
    """The losses and weights of a Trainer with dropout, its default shuffle, and a collator that hides words."""
    run = loops.trainer(folder, loops.bert(0.3), num_train_epochs=2, remove_unused_columns=False)
    run.data_collator = resume_loops.masked
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    return losses, loops.weights(run.model)


def test_two_equal_trainings_are_equal_and_as_without_the_layer(tmp_path: Path) -> None:
    first, again = logged(tmp_path), logged(tmp_path)
    with loops.stock():
        stock = logged(tmp_path)
    assert first[0] == again[0] == stock[0]
    assert loops.same(first[1], stock[1])
    assert len(set(first[0])) == len(first[0]) == 8


def test_an_accelerate_and_a_lightning_loop_are_too(tmp_path: Path) -> None:
    found = []
    for layer in (nullcontext, nullcontext, loops.stock):
        with layer():
            resume_loops.seed_all(11)
            weights = loops.accelerated(loops.bert(0.3))
            pl = lightning_loops.library()
            resume_loops.seed_all(12)
            module = lightning_loops.module(pl)
            lightning_loops.trainer(pl, tmp_path, max_epochs=1).fit(module)
            found.append((weights, loops.weights(module)))
    for weights, of_lightning in found[1:]:
        assert loops.same(weights, found[0][0])
        assert loops.same(of_lightning, found[0][1])
