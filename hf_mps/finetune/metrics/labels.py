"""The metrics of a task that gives one label or value a row."""

from __future__ import annotations

from collections.abc import Sequence

from hf_mps.finetune.metrics.catalogue import OF_LABELS, Metrics, load
from hf_mps.finetune.metrics.chosen import choose

OF_VALUES = ("pearsonr", "spearmanr", "mse", "glue/stsb")


def of_labels(names: Sequence[str], task: str, num_labels: int) -> Metrics:
    """Load metrics that compare one label a row, or one value a row where `num_labels` is 0; the first judges the run.

    Raises UserError for a metric of another kind (of texts, of classes where there are values, …), and as `load`.
    """
    if num_labels:
        choose(names, tuple(OF_LABELS), task)
        return load(names, num_labels=num_labels)
    choose(names, OF_VALUES, f"{task} with labels that are numbers (regression)")
    return load(names)
