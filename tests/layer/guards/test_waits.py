"""How often a Trainer waits for the device with the layer on: never more often than without it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from hf_mps.metal import simulator
from tests.layer.guards import loops

STEPS, TENSORS = 64, 2


def counted(folder: Path, layer: bool) -> simulator.Counted:
    """The counts of a training of 64 steps with two tensors in a batch and a log line every 16 steps."""
    with nullcontext() if layer else loops.stock():
        run = loops.trainer(folder, max_steps=STEPS, logging_steps=16)
        with simulator.counted(places=True) as counts:
            run.train()
    return counts


def ours(counts: simulator.Counted) -> dict[str, int]:
    return {str(place): times for place, times in counts.places.items() if place.where.startswith("hf_mps")}


def test_a_trainer_waits_for_no_batch_and_rarely_for_anything(tmp_path: Path) -> None:
    loops.trainer(tmp_path / "first", max_steps=2).train()  # guards try the device once in a process
    layer = counted(tmp_path / "layer", layer=True)
    assert layer.copies_in >= TENSORS * STEPS
    assert layer.waits <= 0.3 * STEPS, layer.places
    assert sum(ours(layer).values()) <= STEPS / 10, ours(layer)
    stock = counted(tmp_path / "stock", layer=False)
    assert stock.waits >= (TENSORS + 2) * STEPS, "the batch's tensors, and two looks for a loss that is NaN"
    assert layer.copies_out < stock.copies_out
    assert layer.launches <= 1.1 * stock.launches, "a tiny model: norms and sums of few weights weigh much in it"


def test_a_loop_of_ones_own_does_not_wait_for_the_layer(tmp_path: Path) -> None:
    model: Any = loops.bert().to("mps")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {
        name: torch.tensor([row[name] for row in loops.rows()[:8]], device="mps") for name in ("input_ids", "labels")
    }

    def step() -> None:
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(20):  # sentinels look more closely at the first steps
        step()
    with simulator.counted(places=True) as counts:
        for _ in range(32):
            step()
    assert counts.waits <= 2, counts.places
