"""A loss or gradient that is no number ends the run, in one line, with the last good checkpoint as it was."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from hf_mps import guards, sentinels
from hf_mps.errors import RunError
from tests.guards import loops


def finite(folder: Path) -> bool:
    from safetensors.torch import load_file

    return all(bool(each.isfinite().all()) for each in load_file(folder / "model.safetensors").values())


def checkpoints(folder: Path) -> dict[str, bool]:
    """The checkpoints of a run, and whether each one's weights are numbers."""
    return {each.name: finite(each) for each in sorted(folder.glob("checkpoint-*"))}


@pytest.mark.parametrize("logging_steps", [1, 500])
def test_trainer_stops_before_a_checkpoint_of_weights_that_are_no_numbers(logging_steps: int, tmp_path: Path) -> None:
    settings = {
        "num_train_epochs": 3,
        "logging_steps": logging_steps,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
    }
    run = loops.trainer(tmp_path / "with", loops.Diverging(6), **settings)
    at = "at step 6 of 12" if logging_steps == 1 else "at optimizer step 6"
    advice = r"next: a lower learning[_ ]rate.*, or HF_MPS_SENTINELS=-non-finite to go on regardless$"
    with pytest.raises(RunError, match=f"loss is nan {at}; {advice}"):
        run.train()
    assert checkpoints(tmp_path / "with") == {"checkpoint-4": True, "checkpoint-5": True}
    (found,) = sentinels.found()
    assert (found["name"], found["times"]) == ("non-finite", 1)
    with sentinels.suspended("non-finite"):
        loops.trained(tmp_path / "without", model=loops.Diverging(6), **settings)
    assert checkpoints(tmp_path / "without") == {"checkpoint-11": False, "checkpoint-12": False}


def test_a_gradient_that_is_no_number_counts_as_well(tmp_path: Path) -> None:
    model = loops.Diverging(6)
    model.weight.register_hook(lambda gradient: gradient * (math.inf if model.batches == 3 else 1))
    with pytest.raises(RunError, match=r"^grad_norm is inf at step 3 of 4; next: "):
        loops.trainer(tmp_path, model).train()


def test_a_training_that_ends_on_one_says_so(tmp_path: Path) -> None:
    with guards.suspended("nan-hidden"), pytest.raises(RunError, match="the loss is nan at optimizer step 6; "):
        loops.trainer(tmp_path, loops.Diverging(6), max_steps=6, logging_steps=500).train()


def test_the_state_of_an_accelerator_is_not_saved_either(tmp_path: Path) -> None:
    accelerator = loops.new_accelerator()
    model = loops.Diverging(6)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def epoch() -> None:
        for step in range(1, 8):
            accelerator.backward(model(None, None)["loss"])
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state(str(tmp_path / f"step_{step}"))

    with pytest.raises(RunError, match="the loss is nan at optimizer step 6; "):
        epoch()
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"step_{step}" for step in range(1, 6)]


def test_steps_that_gradscaler_skips_are_no_error(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4).to("mps")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("mps")
    for step in range(40):
        factor = math.inf if step % 3 == 0 else 1.0
        scaler.scale((layer(torch.randn(2, 4, device="mps")) * factor).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert sentinels.found() == []


def test_a_training_of_which_gradscaler_skips_every_step_is(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4).to("mps")
    nn.init.constant_(layer.weight, math.nan)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("mps")

    def train() -> None:
        for _ in range(40):
            scaler.scale(layer(torch.randn(2, 4, device="mps")).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    with pytest.raises(
        RunError, match="the loss is nan in 8 steps in a row, all of which GradScaler skipped; next: bf16"
    ):
        train()
