"""Matthews' correlation of predicted and true labels, from -1 to 1; 0 is no better than chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores


class MatthewsCorrelation(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it."""

    def _info(self) -> Any:
        return scores.info(__doc__ or "", value="int64")

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"matthews_correlation": scores.matthews_correlation(predictions, references)}
