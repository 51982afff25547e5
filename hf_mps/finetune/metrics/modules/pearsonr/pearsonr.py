"""Pearson's r: how far predictions and references lie on one line, from -1 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores


class Pearsonr(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it."""

    def _info(self) -> Any:
        return scores.info(__doc__ or "", value="float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"pearsonr": scores.pearsonr(predictions, references)}
