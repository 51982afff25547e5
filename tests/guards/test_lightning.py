"""Lightning's Trainer, under both of its names, trains unchanged on Metal with the guards that it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_mps import guards
from hf_mps.fallback.ledger import ledger
from hf_mps.guards import GuardNotice
from hf_mps.guards.lightning_rng import KEY
from tests.guards import lightning_loops, loops

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:pytorch_lightning")


@pytest.fixture
def budget() -> Iterator[None]:
    """As little memory as a small model and some activations need."""
    torch.mps.set_per_process_memory_fraction(0.01)
    yield
    torch.mps.set_per_process_memory_fraction(1.7)


@pytest.mark.parametrize("accelerator", ["auto", "mps"])
@pytest.mark.parametrize("name", lightning_loops.NAMES)
def test_a_trainer_trains_on_the_device(name: str, accelerator: str, tmp_path: Path) -> None:
    pl = lightning_loops.library(name)
    model = lightning_loops.module(pl, loops.bert())
    before = loops.weights(model)
    run = lightning_loops.trainer(pl, tmp_path, max_steps=2, accelerator=accelerator)
    run.fit(model)
    assert run.strategy.root_device.type == "mps"
    assert not loops.same(before, loops.weights(model))


@pytest.mark.parametrize("name", lightning_loops.NAMES)
def test_a_checkpoint_without_random_states_is_told_of(name: str, tmp_path: Path) -> None:
    pl = lightning_loops.library(name)
    run = lightning_loops.trainer(pl, tmp_path, max_epochs=1)
    run.fit(lightning_loops.module(pl))
    run.save_checkpoint(tmp_path / "whole.ckpt")
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert saved.pop(KEY)["mps"].dtype == torch.uint8
    assert KEY not in torch.load(tmp_path / "weights.ckpt", weights_only=True)
    torch.save(saved, tmp_path / "old.ckpt")
    with pytest.warns(GuardNotice, match="the checkpoint holds no random states"):
        lightning_loops.trainer(pl, tmp_path, max_epochs=2).fit(
            lightning_loops.module(pl), ckpt_path=tmp_path / "old.ckpt"
        )


def test_checkpoints_made_on_the_cpu_are_lightning_s_own(tmp_path: Path) -> None:
    pl = lightning_loops.library()
    run = lightning_loops.trainer(pl, tmp_path, max_steps=1, accelerator="cpu")
    run.fit(lightning_loops.module(pl))
    run.save_checkpoint(tmp_path / "cpu.ckpt")
    assert KEY not in torch.load(tmp_path / "cpu.ckpt", weights_only=True)


class OnFloats(nn.Module):
    """A model over a column of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return type("Output", (), {"loss": self.layer(x).square().mean()})


@pytest.mark.parametrize("name", lightning_loops.NAMES)
def test_a_float64_column_becomes_float32(name: str, tmp_path: Path) -> None:
    pl = lightning_loops.library(name)
    rows = torch.utils.data.DataLoader([{"x": np.ones(3)} for _ in range(4)])
    with guards.suspended("float64-columns"), pytest.raises(TypeError, match="doesn't support float64"):
        lightning_loops.trainer(pl, tmp_path, max_steps=1).fit(lightning_loops.module(pl, OnFloats()), rows)
    with pytest.warns(GuardNotice, match="float64 became float32, which Metal has: x "):
        lightning_loops.trainer(pl, tmp_path, max_steps=1).fit(lightning_loops.module(pl, OnFloats()), rows)


class Hungry(nn.Module):
    """A model that needs 16 MB for each row of its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        wide = torch.ones(len(labels), 4_000_000, device=labels.device)
        return type("Output", (), {"loss": self.layer(wide.sum(1, keepdim=True)).square().mean()})


@pytest.mark.usefixtures("budget")
@pytest.mark.parametrize("name", lightning_loops.NAMES)
def test_the_batch_size_finder_knows_metal_s_out_of_memory(name: str, tmp_path: Path) -> None:
    pl = lightning_loops.library(name)
    tuner = pl.tuner.Tuner

    def found() -> int:
        model = lightning_loops.module(pl, Hungry(), batch_size=1)
        run = lightning_loops.trainer(pl, tmp_path, max_steps=4)
        return int(tuner(run).scale_batch_size(model, init_val=1, steps_per_trial=1))

    with guards.suspended("oom-text"), pytest.raises(RuntimeError, match="MPS backend out of memory"):
        found()
    fits = int(0.01 * torch.mps.recommended_max_memory()) // 16_000_000
    assert fits / 2 < found() <= fits
    assert next(each for each in guards.acted() if each["name"] == "oom-text")


class WithMode(nn.Module):
    """A model with an operator that Metal has no kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        usual = torch.mode(input_ids, dim=1).values
        logits = self.layer(input_ids.float()) + usual[:, None]
        return type("Output", (), {"loss": nn.functional.cross_entropy(logits, labels)})


@pytest.mark.parametrize("name", lightning_loops.NAMES)
def test_an_operator_without_a_kernel_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    pl = lightning_loops.library(name)
    before = ledger.now()
    model = lightning_loops.module(pl, WithMode())
    lightning_loops.trainer(pl, tmp_path, max_steps=2).fit(model)
    assert [(each.operator, each.calls) for each in ledger.report(before).operators] == [("aten::mode", 2)]
