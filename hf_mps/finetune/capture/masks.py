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
def none_is_none() -> Iterator[None]:
    """Let transformers make no mask where there is none, while a step is recorded too, as release 5.23 does.

    Releases before it take every recording for one that may be of another shape (masking_utils.py, `is_tracing`).
    """
    from transformers import masking_utils

    stock = masking_utils.is_tracing

    def is_tracing(tensor: Any = None) -> bool:
        return tensor is not None and bool(stock(tensor))

    masking_utils.is_tracing = is_tracing
    try:
        yield
    finally:
        masking_utils.is_tracing = stock
