"""GLUE's metrics; the configuration is the task: F1 and accuracy for MRPC and QQP, two correlations for STS-B, …"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import evaluate

from hf_mps.finetune.metrics import scores
from hf_mps.finetune.metrics.catalogue import REPORTS


class Glue(evaluate.Metric):  # type: ignore[misc]
    """Reports what the benchmark reports for the task: https://gluebenchmark.com/tasks."""

    def _info(self) -> Any:
        tasks = [name.removeprefix("glue/") for name in REPORTS if name.startswith("glue/")]
        if self.config_name not in tasks:
            raise KeyError(f"'{self.config_name}' is not a task of GLUE; allowed: {', '.join(tasks)}")
        return scores.info(__doc__ or "", value="float64" if self.config_name == "stsb" else "int64")

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {name: scores.FORMULAS[name](predictions, references) for name in REPORTS[f"glue/{self.config_name}"]}
