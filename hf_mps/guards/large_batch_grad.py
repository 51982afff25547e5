"""large-batch-grad: a warning before a batch whose gradients may be a thousand times too large."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards import moments
from hf_mps.guards.guard import Guard, around

TOKENS = 32768
"""Batch times sequence length, above which gradients were found wrong (pytorch#177116)."""


class LargeBatchGrad(Guard):
    """Looks at the shapes of the batches; nothing that it could do keeps the loop's own batch size."""

    name = "large-batch-grad"
    what = "gradients are 1e3 to 1e5 times too large above 32768 tokens (batch x sequence) once another shape has run"
    issue = "https://github.com/pytorch/pytorch/issues/177116"
    until = "pytorch#177116 is closed and the oldest supported torch has the fix"

    def __init__(self) -> None:
        super().__init__()
        self._shapes: set[tuple[int, int]] = set()
        self._told: set[tuple[int, int]] = set()
        self._evaluating = False  # in Trainer, which moves a batch before it switches gradients off

    def applies(self) -> Choice[bool]:
        """Always where there is Metal: it depends on chip, macOS, size and what ran before, so no trial clears it."""
        return Choice(True, "reported for torch 2.10 and 2.11 with sizes that depend on chip and macOS; not closed")

    def forget(self) -> None:
        """Also forget the shapes that have run."""
        super().forget()
        self._shapes.clear()
        self._told.clear()

    def install(self, module: ModuleType) -> None:
        """See batches before they are moved, and when Trainer evaluates."""
        moments.batches(self, module, self._look)
        if module.__name__ == "transformers.trainer":
            around(self, module.Trainer, "evaluation_loop", self._evaluates)

    def _evaluates(self, stock: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        before, self._evaluating = self._evaluating, True
        try:
            return stock(trainer, *args, **kwargs)
        finally:
            self._evaluating = before

    def _look(self, batch: Any) -> Any:
        import torch

        shape = _tokens(batch)
        if shape is None:
            return batch
        self._shapes.add(shape)
        large = shape[0] * shape[1] > TOKENS and len(self._shapes) > 1
        if large and shape not in self._told and torch.is_grad_enabled() and not self._evaluating:
            self._told.add(shape)
            self.acted(
                f"a batch of {shape[0]} x {shape[1]} tokens after other shapes: above {TOKENS} gradients may be "
                f"far too large on Metal; keep batch x sequence below, for example with a batch size of "
                f"{max(1, TOKENS // shape[1])} and gradient accumulation"
            )
        return batch


def _tokens(batch: Any) -> tuple[int, int] | None:
    """Rows and length of the token ids of a batch, or None where it has none.

    Its `input_ids`; where a batch is a tuple or a list, as a TensorDataset's is, its first matrix of whole numbers.
    """
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
    else:
        ids = next(filter(_ids, batch), None) if isinstance(batch, tuple | list) else None
    shape: tuple[int, ...] = tuple(getattr(ids, "shape", ()))
    if len(shape) != 2:
        return None
    rows, length = shape
    return int(rows), int(length)


def _ids(value: Any) -> bool:
    import torch

    whole = (torch.int64, torch.int32)
    return isinstance(value, torch.Tensor) and value.ndim == 2 and value.dtype in whole


GUARD = LargeBatchGrad()
