"""Spearman's rho: how far predictions order the rows as the references do, from -1 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores


class Spearmanr(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it."""

    def _info(self) -> Any:
        return scores.info(__doc__ or "", value="float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"spearmanr": scores.spearmanr(predictions, references)}
