"""Metrics with the interface of `evaluate`'s own modules, which `evaluate.load` would download from the hub.

The same inputs, keywords and results as https://github.com/huggingface/evaluate/tree/main/metrics, computed by the
libraries that those modules use, too: scikit-learn, scipy, rouge-score, SacreBLEU and jiwer. Importing this imports
`evaluate`; the metrics are in `table`.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate

from hf_mps.metrics.table import METRICS

INTERFACES = {name: metric.evaluate for name, metric in METRICS.items() if metric.evaluate is not None}
_TEXT, _NUMBER = datasets.Value("string"), datasets.Value("int32")
# Rows that are more than a number, a text or a list of them.
TYPES: dict[str, Any] = {
    "answer": {"id": _TEXT, "prediction_text": _TEXT},
    "answer or none": {"id": _TEXT, "prediction_text": _TEXT, "no_answer_probability": datasets.Value("float32")},
    # Kept as images: as lists of numbers the maps of 2,000 photographs would take 8 GB.
    "map": datasets.Image(),
    "truths": {"id": _TEXT, "answers": datasets.Sequence({"text": _TEXT, "answer_start": _NUMBER})},
}


def names() -> list[str]:
    """Return the names that `load` takes, sorted."""
    return sorted(INTERFACES)


def load(name: str, config_name: str | None = None, **keywords: Any) -> Any:
    """The evaluate.Metric `name`; `keywords` are those of evaluate.Metric (cache_dir, experiment_id, num_process, …).

    Raises KeyError for a name or a configuration that there is not, ImportError where its library is not installed.
    """
    if name not in INTERFACES:
        raise KeyError(f"'{name}' is not among the metrics here: {', '.join(names())}")
    return Named(name, config_name, **keywords)


class Named(evaluate.Metric):  # type: ignore[misc]
    """The metric `name` of the table, with add, add_batch and compute as every evaluate.Metric has them.

    Raises KeyError for a configuration that there is not, ImportError where its library is not installed.
    """

    def __init__(self, name: str, config_name: str | None = None, **keywords: Any) -> None:
        self._name = name
        super().__init__(config_name, **keywords)

    @property
    def name(self) -> str:
        """As `load` was asked for it; also the name of the metric's folder in evaluate's cache."""
        return self._name

    def _info(self) -> Any:
        entry = INTERFACES[self._name]
        if entry.only and self.config_name not in entry.only:
            raise KeyError(f"{self._name} needs a configuration: one of {', '.join(entry.only)}")
        needs = METRICS[self._name].needs
        if needs is not None and needs.missing:
            raise ImportError(f"{self._name} needs {needs.package}, which is missing: pip install {needs.package}")
        forms = (entry.configs or {}).get(self.config_name, entry.columns)
        features = [datasets.Features(predictions=_type(one), references=_type(other)) for one, other in forms]
        said = dict.fromkeys(("description", "inputs_description"), entry.compute.__doc__ or "")
        form = {"features": features if len(features) > 1 else features[0], "format": "numpy" if entry.numpy else None}
        return evaluate.MetricInfo(citation="", **said, **form)

    def _compute(self, *, predictions: Any, references: Any, **keywords: Any) -> Any:
        entry = INTERFACES[self._name]
        if entry.by_config:
            keywords["config_name"] = self.config_name
        return entry.compute(predictions, references, **keywords)


def _type(said: Any) -> Any:
    return datasets.Sequence(_type(said[0])) if isinstance(said, list) else TYPES.get(said) or datasets.Value(said)
