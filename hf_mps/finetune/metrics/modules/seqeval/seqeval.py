"""Precision, recall and F1 of whole names in tagged words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import tags


class Seqeval(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it, in its default mode: conlleval's rules."""

    def _info(self) -> Any:
        return tags.info(__doc__ or "")

    def _compute(self, predictions: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> dict[str, Any]:
        return tags.seqeval(predictions, references)
