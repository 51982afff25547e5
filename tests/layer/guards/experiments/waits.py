"""Trainings that stand still at each batch until the device has done everything that it was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_mps.metal import simulator
from tests.layer.guards import lightning_loops, loops

MOVES = ("accelerate/utils/operations.py", "lightning/fabric/utilities/apply_func.py", "transformers/masking_utils.py")
"""Where batches are moved and their masks are looked at."""


def unhindered(train: Callable[[], object]) -> bool:
    """Whether a training waits at none of its batches."""
    with simulator.counted(places=True) as counts:
        train()
    return not [place for place in counts.places if place.where.startswith(MOVES) and place.why != "copy to the host"]


def padded() -> list[dict[str, Any]]:
    """Rows with masks, some of which mask something."""
    rows = loops.rows()
    for number, row in enumerate(rows):
        length = 4 if number in (9, 20) else loops.LENGTH
        row["attention_mask"] = [1] * length + [0] * (loops.LENGTH - length)
    return rows


def batches_of_trainer(folder: Path) -> bool:
    """Trainer over rows with padding: two tensors and a mask, which the model looks at."""
    return unhindered(loops.trainer(folder, data=padded()).train)


def batches_of_accelerate(folder: Path) -> bool:
    """A loop of Accelerate's."""
    return unhindered(loops.accelerated)


def batches_of_lightning(folder: Path) -> bool:
    """An epoch of Lightning's Trainer."""
    pl = lightning_loops.library()
    return unhindered(lambda: lightning_loops.trainer(pl, folder, max_epochs=1).fit(lightning_loops.module(pl)))
