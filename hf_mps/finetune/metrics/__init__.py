"""Metrics by `evaluate`'s names, computed without a network.

`evaluate.load("accuracy")` downloads a module from the hub. The modules in `modules/` are our own, in the layout that
`evaluate.load(<folder>)` reads, over scikit-learn and scipy. Importing this package imports none of them.
"""

from __future__ import annotations

from hf_mps.finetune.metrics.catalogue import Baseline, Metrics, available, load
from hf_mps.finetune.metrics.labels import of_labels

__all__ = ["Baseline", "Metrics", "available", "load", "of_labels"]
