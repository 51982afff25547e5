"""Translations: corpus BLEU as SacreBLEU has it, 0 to 100, with its own tokens (13a)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import generation


class Sacrebleu(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it, over one reference a row."""

    def _info(self) -> Any:
        return generation.info("sacrebleu", __doc__ or "")

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return generation.sacrebleu(predictions, references)
