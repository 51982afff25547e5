"""Mean squared error of predictions against references; lower is better."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores


class Mse(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it."""

    def _info(self) -> Any:
        return scores.info(__doc__ or "", value="float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"mse": scores.mse(predictions, references)}
