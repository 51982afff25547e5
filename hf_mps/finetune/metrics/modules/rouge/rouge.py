"""Summaries: overlap of words (ROUGE-1), pairs of words (ROUGE-2) and longest common subsequences (ROUGE-L, Lsum)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import generation


class Rouge(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it, over one reference a row."""

    def _info(self) -> Any:
        return generation.info("rouge", __doc__ or "")

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return generation.rouge(predictions, references)
