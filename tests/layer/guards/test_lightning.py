"""Lightning's Trainer, under both of its names, trains unchanged on Metal with the guards that it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.resume.resume_rng import KEY
from tests.layer.guards import lightning_loops, loops

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::UserWarning:pytorch_lightning")


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
