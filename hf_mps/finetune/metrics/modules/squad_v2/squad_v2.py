"""SQuAD 2.0: exact match and F1 of answers, in percent, of all questions, and of those with and without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import answers


class SquadV2(evaluate.Metric):  # type: ignore[misc]
    """`evaluate`'s names and figures, without its search for the best threshold: an empty text says "no answer"."""

    def _info(self) -> Any:
        return answers.info(__doc__ or "")

    def _compute(
        self, predictions: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
    ) -> dict[str, float]:
        return answers.squad_v2(*answers.columns(predictions, references))
