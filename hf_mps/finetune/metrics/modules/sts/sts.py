"""Semantic similarity: how the cosine of two embeddings correlates with the score that people gave."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores


class Sts(evaluate.Metric):  # type: ignore[misc]
    """sentence-transformers' names: predictions are cosines, references scores of any scale."""

    def _info(self) -> Any:
        return scores.info(__doc__ or "", value="float64")

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {
            "spearman_cosine": scores.spearmanr(predictions, references),
            "pearson_cosine": scores.pearsonr(predictions, references),
        }
