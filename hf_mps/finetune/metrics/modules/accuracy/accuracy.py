"""Accuracy: the share of rows answered rightly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores


class Accuracy(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it."""

    def _info(self) -> Any:
        return scores.info(__doc__ or "", value="int64")

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"accuracy": scores.accuracy(predictions, references)}
