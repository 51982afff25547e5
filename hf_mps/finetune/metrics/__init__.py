"""Metrics by `evaluate`'s names, computed without a network: those of recipes, and `as_evaluate`, for other scripts.

`evaluate.load("accuracy")` downloads a module from the hub. A recipe's metrics are formulas in one table (`catalogue`)
over scikit-learn, scipy, rouge-score, SacreBLEU and jiwer. Importing this package imports none of them.
"""

from __future__ import annotations

from hf_mps.finetune.metrics.catalogue import Baseline, Metrics, available, load, unmeasured
from hf_mps.finetune.metrics.labels import of_labels

__all__ = ["Baseline", "Metrics", "available", "load", "of_labels", "unmeasured"]
