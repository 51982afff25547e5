"""The metrics of a task that gives one label or value a row."""

from __future__ import annotations

from collections.abc import Sequence

from hf_mps.finetune.metrics.catalogue import OF_LABELS, Metrics, load
from hf_mps.finetune.metrics.chosen import choose


def of_labels(names: Sequence[str], task: str, num_labels: int | None = None) -> Metrics:
    """Load metrics that compare one label or value a row; the first of them judges the run.

    Raises UserError for a metric of another kind (of texts, spans, …), and as `load`.
    """
    choose(names, tuple(OF_LABELS), task)
    return load(names, num_labels=num_labels)
