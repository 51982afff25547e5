"""Runs that need more memory than they have to, or than there is, or that do not know how much."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from hf_mps.layer.guards.platform.memory import PYTORCHS
from hf_mps.metal.simulator import strictness
from tests.layer.guards import lightning_loops, loops
from tests.layer.guards.experiments.results import told

GIB = 2**30
METAL = "MPS backend out of memory"


@contextmanager
def of_the_recommended(share: float) -> Iterator[None]:
    """A limit for the device in place of PyTorch's own, which may be smaller than a heap; nothing lies idle."""
    torch.mps.empty_cache()
    torch.mps.set_per_process_memory_fraction(share)
    try:
        with strictness.off("heaps"):
            yield
    finally:
        torch.mps.set_per_process_memory_fraction(PYTORCHS)
        torch.mps.empty_cache()


def growing(wide: int = 400) -> list[dict[str, Tensor]]:
    """Batches that are each a little longer than the one before."""
    return [{"x": torch.ones(8, 8 * length, wide)} for length in range(1, 41)]


def through_twenty_megabytes(train: Any) -> bool:
    """Whether forty lengths, whose longest needs six megabytes, pass through twenty; the guard's figures as small."""
    share = 20e6 / torch.mps.recommended_max_memory()
    with pytest.MonkeyPatch.context() as patch, of_the_recommended(share):
        patch.setattr("hf_mps.layer.guards.platform.memory.PRESSURE", 0.7 * share)
        patch.setattr("hf_mps.layer.guards.platform.memory.GROWN", 0.1 * share)
        patch.setattr("hf_mps.layer.guards.platform.memory.APART", 8)
        try:
            train(nn.Linear(400, 16).to("mps"))
        except RuntimeError as error:
            if METAL not in str(error):
                raise
            return False
    return True


def many_shapes(folder: Path) -> bool:
    """An evaluation that Accelerate feeds goes over forty lengths."""
    loader = loops.new_accelerator().prepare(torch.utils.data.DataLoader(growing(), batch_size=None))

    def evaluate(layer: nn.Linear) -> None:
        with torch.no_grad():
            for batch in loader:
                layer(batch["x"]).square().mean()

    return through_twenty_megabytes(evaluate)


def many_shapes_in_a_plain_loop(folder: Path) -> bool:
    """A loop without any library trains over them."""

    def train(layer: nn.Linear) -> None:
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for batch in growing():
            layer(batch["x"].to("mps")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return through_twenty_megabytes(train)


def untouched(gigabytes: float) -> list[Tensor]:
    """Blocks of the device, a gigabyte each and a rest; nothing is written to them, so they take no real memory."""
    whole, rest = divmod(int(gigabytes * GIB), GIB)
    return [torch.empty(size, dtype=torch.uint8, device="mps") for size in (*[GIB] * whole, rest)]


def told_when_little_is_left(train: Any) -> bool:
    """Whether a person is told of it beside a training for which macOS recommends no more memory."""
    held = untouched(0.97 * torch.mps.recommended_max_memory() / GIB)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        train()
    del held
    torch.mps.empty_cache()
    return told("memory-budget", said)


def near_the_recommended_maximum(folder: Path) -> bool:
    """An Accelerate loop beside whose batches there is little left is told of it before macOS swaps."""
    return told_when_little_is_left(loops.accelerated)


def near_it_in_a_plain_loop(folder: Path) -> bool:
    """A loop without any library is."""

    def train() -> None:
        weight = nn.Parameter(torch.ones(2, device="mps"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        weight.sum().backward()
        optimizer.step()

    return told_when_little_is_left(train)


class Hungry(nn.Module):
    """A model that needs 16 MB for each row of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        wide = torch.empty(len(labels), 4_000_000, device=labels.device)
        return type("Output", (), {"loss": self.layer(wide[:, :1].fill_(1.0)).square().mean()})


SHARE = 0.01
"""Of the recommended maximum: as little as a small model and some rows of `Hungry` need."""


def fitting(search: Any) -> bool:
    """Whether a search ends with a batch size that fits into `SHARE`, and half of it at least."""
    fits = int(SHARE * torch.mps.recommended_max_memory()) // 16_000_000
    with of_the_recommended(SHARE):
        try:
            return bool(fits / 2 < search() <= fits)
        except RuntimeError as error:
            if METAL not in str(error):
                raise
            return False


def executable_batch_size(folder: Path) -> bool:
    """accelerate's find_executable_batch_size, which Trainer's auto_find_batch_size is, finds a size that fits."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=16)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        model = Hungry().to("mps")
        model(torch.ones(batch_size, 1, device="mps"), torch.ones(batch_size, device="mps")).loss.backward()
        return batch_size

    return fitting(train)


def executable_batch_size_of_one_buffer(folder: Path) -> bool:
    """It does so where a single tensor of the batch is larger than any that Metal makes: half of 16 GB."""
    from accelerate.utils import find_executable_batch_size

    @find_executable_batch_size(starting_batch_size=12)  # type: ignore[untyped-decorator]
    def train(batch_size: int) -> int:
        return len(torch.empty(batch_size, GIB, dtype=torch.uint8, device="mps"))

    try:
        return bool(train() < 8)
    except RuntimeError as error:
        if "Invalid buffer size" not in str(error):
            raise
        return False


def lightning_batch_size(folder: Path) -> bool:
    """Lightning's batch size finder does, under both of its names."""

    def search(name: str) -> int:
        pl = lightning_loops.library(name)
        run = lightning_loops.trainer(pl, folder, max_steps=4)
        model = lightning_loops.module(pl, Hungry(), batch_size=1)
        return int(pl.tuner.Tuner(run).scale_batch_size(model, init_val=1, steps_per_trial=1))

    return all(fitting(lambda name=name: search(name)) for name in lightning_loops.NAMES)


class HoldsForAMoment(TrainerCallback):  # type: ignore[misc]
    """Holds 64 MB of the device for a moment in the first step."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        import time

        held = torch.ones(16_000_000, device="mps")
        time.sleep(0.2)
        del held


def memory_metrics(folder: Path) -> bool:
    """Trainer's memory metrics can be logged, and hold the peak that there was."""
    run = loops.trainer(folder, callbacks=[HoldsForAMoment()], skip_memory_metrics=False, max_steps=1)
    metrics = run.train().metrics
    try:
        run.log_metrics("train", metrics)
    except TypeError:
        return False
    return bool(metrics["train_mem_gpu_peaked_delta"] >= 60_000_000)
