"""Memory: no limit changes, a word comes before macOS swaps, and the cache is emptied under pressure alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest
import torch
from inline_snapshot import snapshot
from torch import nn
from transformers.trainer import TrainerMemoryTracker

from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.platform.memory import APART, PYTORCHS, SETTLED, VARIABLE
from hf_mps.metal.device import machine
from hf_mps.metal.simulator import strictness
from tests import hazards
from tests.layer.guards import loops
from tests.layer.guards.experiments.memory import GIB, of_the_recommended, untouched


class Steps:
    """A plain loop: each step needs `gigabytes` for a moment, which then lie idle in the allocator."""

    def __init__(self) -> None:
        weight = nn.Parameter(torch.ones(2, device="mps"))
        weight.grad = torch.zeros_like(weight)
        self.optimizer = torch.optim.SGD([weight])

    def take(self, gigabytes: list[float]) -> None:
        for each in gigabytes:
            needed = untouched(each)
            del needed
            self.optimizer.step()


def batches(shapes: list[tuple[int, int]]) -> int:
    """Send batches of these shapes through an Accelerate loader; returns how many came out."""
    rows = [{"input_ids": torch.ones(shape, dtype=torch.long)} for shape in shapes]
    return len(list(loops.new_accelerator().prepare(torch.utils.data.DataLoader(rows, batch_size=None))))


@pytest.fixture(autouse=True)
def _nothing_idle() -> Iterator[None]:
    torch.mps.empty_cache()
    yield
    torch.mps.empty_cache()


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the process held, in GiB, whenever the cache was emptied."""
    found: list[float] = []
    stock = torch.mps.empty_cache

    def empty_cache() -> None:
        found.append(torch.mps.driver_allocated_memory() / GIB)
        stock()

    monkeypatch.setattr(torch.mps, "empty_cache", empty_cache)
    return found


def beyond_the_machine() -> int:
    """Bytes that the process holds in a step that needs half a gigabyte more than the machine has, and one after it."""
    held = untouched(machine.present().memory / GIB + 0.5)
    Steps().take([0.0, 0.5])
    return torch.mps.current_allocated_memory() if held else 0


def test_a_run_that_stock_finishes_by_swapping_a_little_finishes() -> None:
    with of_the_recommended(PYTORCHS), pytest.warns(GuardNotice, match="soon macOS swaps"):
        assert beyond_the_machine() > machine.present().memory


@pytest.mark.default_mac
def test_the_report_has_the_limit_and_who_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = guards.get("memory-budget")
    monkeypatch.delenv(VARIABLE, raising=False)
    assert guard.applies().reason == snapshot(
        "tells before macOS swaps: PyTorch takes up to 18.1 GiB, the machine has 16.0 GiB (simulated), of which "
        "10.7 GiB are recommended"
    )
    monkeypatch.setenv(VARIABLE, "1.2")
    assert f"PyTorch has the user's {VARIABLE}=1.2, the machine" in guard.applies().reason


@pytest.mark.default_mac
def test_a_process_near_the_recommended_maximum_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mps.metal.device.memory.driver", lambda device: int(10.5 * 2**30))
    monkeypatch.setattr("hf_mps.layer.guards.platform.memory.EVERY", 0.0)
    line = r"holds 10\.5 GiB of GPU memory, and macOS recommends at most 10\.7 GiB \(simulated\): "
    with pytest.warns(GuardNotice, match=line):
        assert batches([(2, 3)] * 3) == 3
    assert guards.get("memory-budget").times == 1


@pytest.mark.default_mac
def test_a_machine_without_memory_left_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_mps.metal.device.memory.driver", lambda device: 5 * 2**30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**28))
    line = r"0\.2 GiB of 16\.0 GiB \(simulated\) are left, with 5\.0 GiB held here: soon macOS swaps"
    with pytest.warns(GuardNotice, match=line):
        batches([(2, 3)])


def test_figures_are_asked_for_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("hf_mps.metal.device.memory.driver", lambda device: asked.append(device) or 0)
    batches([(2, 3)] * 50)
    assert len(asked) <= 3


@hazards.armed("shape-growth")
def test_many_shapes_are_told_of_once_with_what_to_do() -> None:
    with pytest.warns(GuardNotice, match=r"batches of 16 different lengths so far: .*pad_to_multiple_of=64"):
        batches([(2, length) for length in range(1, 20)])
    assert len([line for line in guards.get("shape-growth").lines if "different lengths" in line]) == 1


def test_lists_of_numbers_and_words_in_a_batch_of_rows_are_no_shapes() -> None:
    for length in range(1, 40):
        guards.get("shape-growth")._at_batch([{"prompt": ["a"] * length, "ids": [1] * length}])
    assert not [line for line in guards.get("shape-growth").lines if "different lengths" in line]


def test_new_shapes_without_pressure_leave_the_cache_alone(emptied: list[float]) -> None:
    steps = Steps()
    for number in range(2 * APART):
        batches([(number + 1, number % 4 + 1)])
        steps.take([3.0])  # 28 % of the recommended maximum lie idle
    assert not emptied


@pytest.mark.default_mac
def test_a_large_model_with_batches_of_one_shape_keeps_its_cache(emptied: list[float]) -> None:
    held = untouched(5.0)
    Steps().take([4.5] * 2 * APART)  # 89 % in use, and half of it idle after each step
    assert held
    assert not emptied


def test_the_metrics_of_a_training_on_the_cpu_ask_nothing_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: asked.append(1) or 0)
    tracker = TrainerMemoryTracker()
    tracker.torch = None  # as it is made where a training goes to the CPU

    def train() -> None:  # the stage is its caller's name
        tracker.start()
        tracker.stop("train")

    train()
    assert set(tracker.cpu["train"]) >= {"alloc", "peaked"}
    assert not asked


@pytest.fixture
def _up_to_2_13() -> Iterator[None]:
    """The allocator that keeps whole buffers; that of 2.14 holds less, whatever the shapes."""
    with strictness.on("heaps", "whole-buffers"):
        yield


@hazards.armed("shape-growth")
@pytest.mark.usefixtures("_up_to_2_13")
@pytest.mark.default_mac
def test_under_pressure_memory_that_grew_is_given_back_once_in_a_while(emptied: list[float]) -> None:
    steps = Steps()
    held = untouched(5.0)
    # Each size has buffers of its own: ten sizes hold 4.4 GiB, of which the largest needs 2.
    steps.take([0.2 * number for number in range(1, 20)])
    assert emptied == [pytest.approx(9.4, abs=0.05)]
    steps.take([3.9] * 2 * (SETTLED + APART))  # the first sizes are given back, then the loop has settled
    assert len(emptied) == 2
    steps.take([5.2])
    assert len(emptied) == 3
    assert held
    assert guards.get("shape-growth").times == 3
