"""Word error rate: edits of words for each word of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import edits


class Wer(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it, over all rows together."""

    def _info(self) -> Any:
        return edits.info(__doc__ or "")

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return {"wer": edits.wer(predictions, references)}
