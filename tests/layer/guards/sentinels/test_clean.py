"""Right trainings of many kinds: no sentinel speaks, and the device is read once in many steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mps.layer import guards
from hf_mps.layer.guards.sentinels import stream
from hf_mps.layer.guards.sentinels.weights_still import STEPS
from tests.layer.guards import lightning_loops, loops
from tests.layer.guards.experiments import results


def long_trainer(folder: Path) -> None:
    """A schedule that begins at a learning rate of 0, until the rows are learned."""
    loops.trained(folder, num_train_epochs=15, warmup_steps=5)


def adafactor(folder: Path) -> None:
    loops.trained(folder, optim="adafactor", num_train_epochs=3)


def slow_sgd(folder: Path) -> None:
    """Steps so small that float32 loses many of them."""
    loops.trained(folder, optim="sgd", learning_rate=1e-7, num_train_epochs=3)


def bfloat16_weights(folder: Path) -> None:
    """Weights in bfloat16 and a learning rate that it cannot add to a weight of 1."""
    loops.trained(folder, model=loops.bert().to(torch.bfloat16), learning_rate=1e-4, num_train_epochs=3)


def overflowing_fp16(folder: Path) -> None:
    """fp16 whose first steps GradScaler skips, until its scale fits."""
    results.needs_fp16()
    loops.trained(folder, model=results.steep(), fp16=True, max_grad_norm=0.0, num_train_epochs=5)


def unclipped(folder: Path) -> None:
    loops.trained(folder, max_grad_norm=0.0, num_train_epochs=6)


def accumulating(folder: Path) -> None:
    loops.trained(folder, gradient_accumulation_steps=2, num_train_epochs=4)


def lora(folder: Path) -> None:
    """LoRA, whose second matrices begin at zero and whose first have no gradient in the first step."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["query", "value"], modules_to_save=["classifier"])
    loops.trained(folder, model=get_peft_model(loops.bert(), config), num_train_epochs=4)


def frozen(folder: Path) -> None:
    model = loops.bert()
    model.bert.requires_grad_(False)
    loops.trained(folder, model=model, num_train_epochs=4)


def accelerate_loop(folder: Path) -> None:
    loops.accelerated(weight_decay=0.1)


def lightning(folder: Path) -> None:
    pl = lightning_loops.library()
    lightning_loops.trainer(pl, folder, max_epochs=4).fit(lightning_loops.module(pl))


def two_optimizers(folder: Path) -> None:
    """Two models by turns, whose gradients are of very different size."""
    models = [nn.Linear(4, 1, device="mps") for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for _ in range(40):
        for model, optimizer, size in zip(models, optimizers, (1e-3, 1e3), strict=True):
            (model(torch.randn(8, 4, device="mps")) * size).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def lbfgs(folder: Path) -> None:
    """An optimizer that calls its closure many times in a step."""
    layer, goal = nn.Linear(4, 4, device="mps"), torch.randn(8, 4, device="mps")
    features = torch.randn(8, 4, device="mps")
    optimizer = torch.optim.LBFGS(layer.parameters(), lr=0.1)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (layer(features) - goal).square().mean()
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)


def learned(folder: Path) -> None:
    """A loss that is exactly zero from its first steps on."""
    weight = nn.Parameter(torch.ones(4, device="mps"))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    loops.descend(lambda: torch.relu(weight.sum() - 2), optimizer, 60)


CLEAN: list[Callable[[Path], None]] = [
    long_trainer,
    adafactor,
    slow_sgd,
    bfloat16_weights,
    overflowing_fp16,
    unclipped,
    accumulating,
    lora,
    frozen,
    accelerate_loop,
    lightning,
    two_optimizers,
    lbfgs,
    learned,
]


@pytest.mark.parametrize("training", CLEAN)
def test_no_sentinel_speaks(training: Callable[[Path], None], tmp_path: Path) -> None:
    training(tmp_path)
    assert guards.found() == []


def steps(count: int, device: str = "mps", gathered: int = 1) -> None:
    """A plain loop over as many steps, each of which gathers the gradients of some batches."""
    layer = nn.Linear(4, 4, device=device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
    for _ in range(count):
        for _ in range(gathered):
            layer(torch.randn(2, 4).to(device)).square().sum().backward()
        nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("count", "gathered", "expected"),
    [
        (16 + 3 * stream.READ, 1, [16, 16, 64, 64, 64]),  # a loss and a norm of each step
        (16 + stream.READ, 32, [8 * 33, 8 * 33, 32 * 33]),
    ],
)
def test_the_device_is_read_once_in_32_steps_however_many_batches_each_gathers(
    count: int, gathered: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    stock = stream._values
    monkeypatch.setattr(stream, "_values", lambda scalars: reads.append(len(scalars)) or stock(scalars))
    with guards.suspended("stopped-gpu"):  # it adds its number
        steps(count, gathered=gathered)
    assert reads == expected


class Waits(TorchDispatchMode):
    """Counts what makes the host wait for Metal: a number that is read, and a copy to or from the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        there = isinstance(found, torch.Tensor) and found.device.type == "mps"
        crosses = name == "_to_copy" and args[0].device.type != found.device.type
        # torch.tensor(…, device="mps") copies unseen, and hands the result on by lift_fresh.
        made_there = name == "lift_fresh" and there
        self.count += crosses or made_there or (name == "_local_scalar_dense" and args[0].device.type == "mps")
        return found


def test_watching_weights_waits_once_for_the_device() -> None:
    def waits() -> int:
        with Waits() as counted:
            steps(STEPS)
        return counted.count

    with guards.suspended("weights-still"):
        without = waits()
    assert waits() - without == 1


def test_nothing_is_kept_of_a_training_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_values", lambda scalars: pytest.fail("the CPU was read"))
    steps(40, "cpu")


def test_nothing_is_kept_of_a_training_that_is_over() -> None:
    steps(10)
    gc.collect()
    assert not stream.STREAM._series


def test_a_program_that_never_steps_keeps_few_losses() -> None:
    weight = nn.Parameter(torch.ones(4, device="mps"))
    for _ in range(200):
        weight.square().sum().backward()
    assert len(stream.STREAM._losses) <= 2 * stream.READ
