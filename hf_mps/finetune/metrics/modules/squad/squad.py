"""SQuAD 1.1: exact match and F1 of answers, in percent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import answers


class Squad(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it: predictions with `id` and `prediction_text`, references with `id` and `answers`."""

    def _info(self) -> Any:
        return answers.info(__doc__ or "")

    def _compute(
        self, predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        return answers.squad(*answers.columns(predictions, references))
