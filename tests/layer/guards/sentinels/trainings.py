"""Trainings that a hazard of the device makes wrong without an error, in the loops that people use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tests.layer.guards import lightning_loops, loops
from tests.layer.guards.experiments import results

Training = Callable[[Path], object]


def transposed_trainer(folder: Path) -> None:
    """Trainer, weights transposed, an optimizer that is not fused."""
    loops.trained(folder, model=results.transposed(), optim="adamw_torch")


def transposed_accelerator(folder: Path) -> None:
    """An Accelerate loop over the same weights, with AdamW's weight decay, which does move them a little."""
    loops.accelerated(results.transposed(), weight_decay=0.1)


def transposed_lightning(folder: Path) -> None:
    """Lightning, whose optimizers step with a closure."""
    pl = lightning_loops.library()
    lightning_loops.trainer(pl, folder, max_epochs=1).fit(lightning_loops.module(pl, results.transposed()))


def transposed_sgd(folder: Path) -> None:
    """A plain loop; torch's Adagrad writes with addcdiv_ too."""
    weight = nn.Parameter(torch.ones(3, 4, device="mps").t())
    other = nn.Parameter(torch.ones(4, 3, device="mps"))
    optimizer = torch.optim.Adagrad([weight, other], lr=0.1)
    loops.descend(lambda: weight.square().sum() + other.square().sum(), optimizer, 4)


def overflowed_trainer(folder: Path) -> None:
    """Trainer with fp16 and its default optimizer, over steps that overflow."""
    results.needs_fp16()
    loops.trained(folder, model=results.steep(), fp16=True, max_grad_norm=0.0, num_train_epochs=3)


def overflowed_loop(folder: Path) -> None:
    """The same in a plain loop with GradScaler and a fused optimizer, which no library watches."""
    layer = nn.Linear(4, 4).to("mps")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("mps")
    for step in range(20):
        factor = float("inf") if step == 2 else 1.0
        scaler.scale((layer(torch.ones(2, 4, device="mps")) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def long_sums(folder: Path, *, clip: bool = True) -> None:
    """A plain loop with small batches, until one has more than 32,766 tokens."""
    torch.manual_seed(0)
    layer = nn.Linear(16, 16, device="mps")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-4)
    for step in range(16):
        rows = 4097 if step == 12 else 8
        loss = layer(torch.ones(rows, 8, 16, device="mps")).mean()
        used = torch.full((2**20,), 50.0, device="mps")  # what lies in freed memory is what is summed too
        del used
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def long_sums_without_clipping(folder: Path) -> None:
    """The same where nobody asks for the norm."""
    long_sums(folder, clip=False)


def frozen_features(folder: Path) -> None:
    """A layer norm trained on the features of a frozen backbone, the same rows in each step."""
    torch.manual_seed(0)
    features, goal = torch.randn(16, 8, device="mps"), torch.randn(16, 8, device="mps")
    layer = nn.LayerNorm(8, device="mps")
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.0)
    loops.descend(lambda: (layer(features) - goal).square().mean(), optimizer, 50)


# Hazard -> the sentinel that sees it, and the trainings.
SEEN: dict[str, tuple[str, tuple[Training, ...]]] = {
    "non-contiguous": (
        "weights-still",
        (transposed_trainer, transposed_accelerator, transposed_lightning, transposed_sgd),
    ),
    "fused-overflow": ("non-finite", (overflowed_trainer, overflowed_loop)),
    "large-k": ("gradient-norm", (long_sums, long_sums_without_clipping)),
    "frozen-norm": ("loss-frozen", (frozen_features,)),
}
