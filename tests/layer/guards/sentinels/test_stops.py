"""With HF_MPS_SENTINELS=stop a loss or gradient that is NaN or infinite ends the run, the last good checkpoint kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from hf_mps.core.errors import RunError
from hf_mps.layer import guards
from tests.layer.guards import loops


@pytest.fixture(autouse=True)
def _stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_MPS_SENTINELS", "stop")


def finite(folder: Path) -> bool:
    return all(bool(each.isfinite().all()) for each in load_file(folder / "model.safetensors").values())


def checkpoints(folder: Path) -> dict[str, bool]:
    """The checkpoints of a run, and whether each one's weights are finite."""
    return {each.name: finite(each) for each in sorted(folder.glob("checkpoint-*"))}


@pytest.mark.parametrize("logging_steps", [1, 500])
def test_trainer_stops_before_a_checkpoint_of_weights_that_are_nan(logging_steps: int, tmp_path: Path) -> None:
    settings = {
        "num_train_epochs": 3,
        "logging_steps": logging_steps,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
    }
    run = loops.trainer(tmp_path / "with", loops.Diverging(6), **settings)
    at = "at step 6 of 12" if logging_steps == 1 else "at optimizer step 6"
    advice = r"next: a lower learning[_ ]rate.*, or HF_MPS_SENTINELS without stop to go on regardless$"
    with pytest.raises(RunError, match=f"loss is nan {at}; {advice}"):
        run.train()
    assert checkpoints(tmp_path / "with") == {"checkpoint-4": True, "checkpoint-5": True}
    (found,) = guards.found()
    assert (found["name"], found["times"]) == ("non-finite", 1)
    with guards.suspended("non-finite"):
        loops.trained(tmp_path / "without", model=loops.Diverging(6), **settings)
    assert checkpoints(tmp_path / "without") == {"checkpoint-11": False, "checkpoint-12": False}


def test_a_gradient_that_is_infinite_counts_as_well(tmp_path: Path) -> None:
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


def test_steps_that_gradscaler_skips_are_no_error() -> None:
    layer = nn.Linear(4, 4).to("mps")
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("mps")
    for step in range(40):
        factor = math.inf if step % 3 == 0 else 1.0
        scaler.scale((layer(torch.randn(2, 4, device="mps")) * factor).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert guards.found() == []


def scaled(steps: int, scaler: torch.amp.GradScaler) -> None:
    """As many steps of a layer whose weights are NaN: GradScaler skips every one."""
    layer = nn.Linear(4, 4).to("mps")
    nn.init.constant_(layer.weight, math.nan)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        scaler.scale(layer(torch.randn(2, 4, device="mps")).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def test_a_training_of_which_gradscaler_skips_every_step_is() -> None:
    with pytest.raises(
        RunError, match="the loss is nan in 8 steps in a row, all of which GradScaler skipped; next: bf16"
    ):
        scaled(40, torch.amp.GradScaler("mps"))


def test_steps_that_one_gradscaler_skipped_are_not_anothers() -> None:
    for _ in range(3):
        scaled(5, torch.amp.GradScaler("mps"))
    assert guards.found() == []


def skip_by_norm(step: int, layer: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Look at what clipping returns, clear the gradients, take the next batch."""
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    if not norm.isfinite():
        optimizer.zero_grad()
        return True
    return False


def skip_by_loss(step: int, layer: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Look at the loss alone, and never clip; the model clears."""
    if step % 5 == 2:
        layer.zero_grad()
        return True
    return False


def skip_by_hand(step: int, layer: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Clear the gradients without asking the optimizer or the model."""
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    if not norm.isfinite():
        for parameter in layer.parameters():
            parameter.grad = None
        return True
    return False


@pytest.mark.parametrize("skipped", [skip_by_norm, skip_by_loss, skip_by_hand])
def test_a_loop_that_skips_bad_batches_itself_is_left_alone(skipped: Callable[..., bool]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, device="mps")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    taken = 0
    for step in range(60):
        bad = math.nan if step % 5 == 2 else 1.0
        (layer(torch.randn(2, 4, device="mps")) * bad).square().mean().backward()
        if skipped(step, layer, optimizer):
            continue
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
    assert taken == 48
    assert guards.found() == []


def test_a_bad_batch_among_several_that_make_one_step_counts() -> None:
    layer = nn.Linear(4, 4, device="mps")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)

    def train() -> None:
        for number in range(24):
            factor = math.inf if number == 3 else 1.0
            (layer(torch.ones(2, 4, device="mps")) * factor).square().mean().backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    with pytest.raises(RunError, match="the loss is inf at optimizer step 2; "):
        train()
