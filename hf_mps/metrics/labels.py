"""Metrics of one label or value a row, by scikit-learn and scipy; undefined figures are theirs, warnings included.

Keywords that are not named here are those of the library's own function, as `evaluate` hands them on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Numbers = Any
"""A list or an array of numbers, of shape (n,); (n, labels) for configurations of several labels a row."""


def accuracy(predictions: Numbers, references: Numbers, **keywords: Any) -> dict[str, float]:
    """Return the share of rows answered rightly, or with normalize=False their number."""
    from sklearn.metrics import accuracy_score

    return {"accuracy": float(accuracy_score(references, predictions, **keywords))}


def f1(predictions: Numbers, references: Numbers, **keywords: Any) -> dict[str, Any]:
    """F1: keywords labels, pos_label, average, sample_weight, zero_division; average=None gives one for each label."""
    return _averaged("f1", predictions, references, **keywords)


def precision(predictions: Numbers, references: Numbers, **keywords: Any) -> dict[str, Any]:
    """Precision: keywords as `f1`."""
    return _averaged("precision", predictions, references, **keywords)


def recall(predictions: Numbers, references: Numbers, **keywords: Any) -> dict[str, Any]:
    """Recall: keywords as `f1`."""
    return _averaged("recall", predictions, references, **keywords)


def _averaged(name: str, predictions: Numbers, references: Numbers, **keywords: Any) -> dict[str, Any]:
    from sklearn import metrics

    score = getattr(metrics, f"{name}_score")(references, predictions, **keywords)
    return {name: float(score) if getattr(score, "size", 1) == 1 else score}


def matthews_correlation(
    predictions: Numbers, references: Numbers, sample_weight: Sequence[float] | None = None, average: str | None = None
) -> dict[str, Any]:
    """Matthews' phi in [-1, 1]; of several labels a row one for each, or their mean with average="macro".

    Raises ValueError for another average.
    """
    import numpy
    from sklearn.metrics import matthews_corrcoef

    if average not in (None, "macro"):
        raise ValueError(f"matthews_correlation has average=None and average='macro', not {average!r}")
    truths, answers = numpy.asarray(references), numpy.asarray(predictions)
    if truths.ndim == 1:
        return {"matthews_correlation": float(matthews_corrcoef(truths, answers, sample_weight=sample_weight))}
    found = [matthews_corrcoef(*pair, sample_weight=sample_weight) for pair in zip(truths.T, answers.T, strict=True)]
    return {"matthews_correlation": float(numpy.mean(found)) if average else found}


def pearsonr(predictions: Numbers, references: Numbers, return_pvalue: bool = False) -> dict[str, float]:
    """Pearson's r, with return_pvalue=True also `p-value`."""
    from scipy import stats

    r, p = stats.pearsonr(references, predictions)
    return {"pearsonr": float(r)} | ({"p-value": float(p)} if return_pvalue else {})


def spearmanr(predictions: Numbers, references: Numbers, return_pvalue: bool = False) -> dict[str, float]:
    """Spearman's rho, with return_pvalue=True also `spearmanr_pvalue`."""
    from scipy import stats

    rho, p = stats.spearmanr(references, predictions)
    return {"spearmanr": float(rho)} | ({"spearmanr_pvalue": float(p)} if return_pvalue else {})


def mse(predictions: Numbers, references: Numbers, squared: bool = True, **keywords: Any) -> dict[str, Any]:
    """Return the mean squared error, or with squared=False its root."""
    from sklearn import metrics

    formula = metrics.mean_squared_error if squared else metrics.root_mean_squared_error
    return {"mse": formula(references, predictions, **keywords)}


def mae(predictions: Numbers, references: Numbers, **keywords: Any) -> dict[str, Any]:
    """Return the mean absolute error."""
    from sklearn.metrics import mean_absolute_error

    return {"mae": mean_absolute_error(references, predictions, **keywords)}


def plain_accuracy(predictions: Any, references: Any) -> dict[str, float]:
    """Return the share of rows answered rightly."""
    return {"accuracy": float((predictions == references).mean())}


def glue(predictions: Any, references: Any, config_name: str) -> dict[str, Any]:
    """Return what the benchmark reports for the task `config_name`: https://gluebenchmark.com/tasks."""
    if config_name == "cola":
        return matthews_correlation(predictions, references)
    if config_name == "stsb":
        return {"pearson": pearsonr(predictions, references)["pearsonr"]} | spearmanr(predictions, references)
    found = plain_accuracy(predictions, references)
    return found | f1(predictions, references) if config_name in ("mrpc", "qqp") else found
