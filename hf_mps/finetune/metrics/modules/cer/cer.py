"""Character error rate: edits of characters for each character of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import edits


class Cer(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it, over all rows together."""

    def _info(self) -> Any:
        return edits.info(__doc__ or "")

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        return {"cer": edits.cer(predictions, references)}
