"""Batches of one shape for a training step: so many rows, each so long, whatever the rows at hand are like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_mps.finetune.task import Prepared


def collate(prepared: Prepared, trainer: Any, rows: int, length: int | None, first: int = 0) -> Any:
    """A batch of `rows` training rows as the trainer collates them, from row `first` on, begun again at the end.

    With `length`, every row is repeated or cut to so many tokens before. Images get the model's own size.
    """
    count = len(prepared.train)
    chosen = [dict(prepared.train[(first + number) % count]) for number in range(rows)]
    if length is not None:
        chosen = [stretched(row, length) for row in chosen]
    collator = trainer.data_collator
    return _sized(collator(chosen), getattr(trainer.model, "config", None))


def stretched(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """A row of features whose lists of tokens are repeated, or cut, to `length`; other columns stay.

    A list belongs to the tokens where it is as long as the first of the row's lists of integers.
    """
    lists = {name: value for name, value in row.items() if isinstance(value, list) and value}
    flat = {name: value for name, value in lists.items() if isinstance(value[0], int)}
    width = len(next(iter(flat.values()))) if flat else 0
    made = dict(row)
    for name, value in flat.items():
        if len(value) == width or name == "labels":
            made[name] = (value * (length // len(value) + 1))[:length]
    return made


def longest(prepared: Prepared) -> int | None:
    """The tokens that rows are cut to, which the longest of real rows may reach; None where rows have no tokens."""
    choice = prepared.choices.get("lengths")
    return int(getattr(choice.value, "longest", 0)) or None if choice is not None else None


def _sized(batch: Any, config: Any) -> Any:
    """The batch with pictures of the size that the model's configuration names: small stand-ins have small ones."""
    size = getattr(config, "image_size", None)
    if not isinstance(batch, dict) or "pixel_values" not in batch or size is None:
        return batch
    pixels = batch["pixel_values"]
    height, width = (size, size) if isinstance(size, int) else size
    if tuple(pixels.shape[-2:]) != (height, width):
        batch["pixel_values"] = pixels.new_zeros((*pixels.shape[:-2], height, width))
    return batch
