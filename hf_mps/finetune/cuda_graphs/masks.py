"""Attention masks while a step is recorded: a batch without padding needs none, and may take the faster kernel.

transformers looks on the device whether a mask hides anything, at each step (masking_utils.py, `padding_mask.all()`),
and where it cannot look, makes one that hides nothing: another kernel for attention, with other random draws, more
memory and less speed. Here the mask is looked at on the host, before the batch goes to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

MASK = "attention_mask"


@dataclass
class Unmasked:
    """A collator around a text model's: batches in which every token is one of a row's own go without their mask."""

    inner: Callable[[list[Any]], Any]

    def __call__(self, features: list[Any]) -> Any:
        batch = self.inner(features)
        if isinstance(batch, Mapping) and "input_ids" in batch and MASK in batch:
            mask = batch[MASK]
            if getattr(mask, "shape", None) == batch["input_ids"].shape and bool(mask.all()):
                del batch[MASK]  # type: ignore[attr-defined]
        return batch


@contextmanager
def as_they_are(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Let transformers take no mask for none, and positions that it makes itself for those of one sequence a row.

    While a step is recorded it cannot look, and makes a mask of both (masking_utils.py: `is_tracing`, of no mask up to
    release 5.22, and `find_packed_sequence_indices`). Positions that the batch brings are left to it.
    """
    from transformers import masking_utils

    names = ("is_tracing", "find_packed_sequence_indices")
    stock = {name: getattr(masking_utils, name) for name in names if hasattr(masking_utils, name)}

    def is_tracing(tensor: Any = None) -> bool:
        return tensor is not None and bool(stock["is_tracing"](tensor))

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        return stock["find_packed_sequence_indices"](position_ids) if "position_ids" in inputs else None

    ours = {"is_tracing": is_tracing, "find_packed_sequence_indices": find_packed_sequence_indices}
    for name in stock:
        setattr(masking_utils, name, ours[name])
    try:
        yield
    finally:
        for name, function in stock.items():
            setattr(masking_utils, name, function)
