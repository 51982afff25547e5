"""Recall: of the rows that are 1, the share called 1; or averaged over labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores


class Recall(evaluate.Metric):  # type: ignore[misc]
    """As `evaluate` names it; a configuration (macro, micro, weighted) or `average` covers many labels."""

    def _info(self) -> Any:
        return scores.info(__doc__ or "", value="int64")

    def _compute(
        self, predictions: Sequence[int], references: Sequence[int], average: str | None = None, pos_label: int = 1
    ) -> dict[str, float]:
        return scores.averaged_as("recall", self.config_name, predictions, references, average, pos_label)
