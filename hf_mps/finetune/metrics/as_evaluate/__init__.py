"""Metrics with the interface of `evaluate`'s own modules, which `evaluate.load` would download from the hub.

The same inputs, keywords and results as https://github.com/huggingface/evaluate/tree/main/metrics, computed by the
libraries that those modules use, too: scikit-learn, scipy, rouge-score, SacreBLEU and jiwer.
"""

from __future__ import annotations

from typing import Any

from hf_mps.finetune.metrics.as_evaluate.table import METRICS


def names() -> list[str]:
    """The names that `load` takes, sorted."""
    return sorted(METRICS)


def load(name: str, config_name: str | None = None, **keywords: Any) -> Any:
    """The evaluate.Metric `name`; `keywords` are those of evaluate.Metric (cache_dir, experiment_id, num_process, …).

    Raises KeyError for a name or a configuration that there is not, ImportError where its library is not installed.
    """
    if name not in METRICS:
        raise KeyError(f"'{name}' is not among the metrics here: {', '.join(names())}")
    from hf_mps.finetune.metrics.as_evaluate.module import Named

    return Named(name, config_name, **keywords)
