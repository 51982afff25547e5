"""Translations: character F-score chrF2, 0 to 100."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import generation


class Chrf(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it, over one reference a row."""

    def _info(self) -> Any:
        return generation.info("chrf", __doc__ or "")

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return generation.chrf(predictions, references)
