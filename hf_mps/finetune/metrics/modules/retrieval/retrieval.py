"""Retrieval by cosine: how often the right text is the nearest, and the mean of one over its rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores


class Retrieval(evaluate.Metric):  # type: ignore[misc]
    """sentence-transformers' names: predictions are the ranks at which the right text came.

    References are the rank wanted, 1 in every row. A rank beyond 10 counts as 0 in `cosine_mrr@10`.
    """

    def _info(self) -> Any:
        return scores.info(__doc__ or "", value="int64")

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {
            "cosine_accuracy@1": scores.accuracy(predictions, references),
            "cosine_mrr@10": sum(1 / rank for rank in predictions if rank <= 10) / len(predictions),
        }
