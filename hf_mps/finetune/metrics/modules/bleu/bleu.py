"""Translations: corpus BLEU as evaluate's module of that name has it, 0 to 1, without smoothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import generation


class Bleu(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it, over one reference a row."""

    def _info(self) -> Any:
        return generation.info("bleu", __doc__ or "")

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return generation.bleu(predictions, references)
