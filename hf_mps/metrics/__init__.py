"""Metrics by `evaluate`'s names, computed without a network: those of recipes, and `as_evaluate`, for other scripts.

`evaluate.load("accuracy")` downloads a module from the hub. A recipe's metrics are formulas in one table (`table`)
over scikit-learn, scipy, rouge-score, SacreBLEU and jiwer. Importing this package imports none of them.
"""

from __future__ import annotations

from hf_mps.metrics.selection import Baseline, Metrics, available, load, of_labels, unmeasured

__all__ = ["Baseline", "Metrics", "available", "load", "of_labels", "unmeasured"]
