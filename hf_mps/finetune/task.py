"""What a task hands to the runner: features, model, collator and metrics, with everything that it decided."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_mps.choice import Choice

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.metrics import Baseline, Metrics


@dataclass
class Prepared:
    """A task ready for Trainer. `train` and `validation` hold the model's own columns alone, as Python numbers."""

    train: Dataset
    validation: Dataset
    model: Any
    processing_class: Any
    collator: Callable[[list[dict[str, Any]]], dict[str, Any]]
    metrics: Metrics
    compute_metrics: Callable[[Any], dict[str, float]]
    baseline: Baseline | None
    auto_class: str
    pipeline_tag: str
    choices: dict[str, Choice[Any]] = field(default_factory=dict)
