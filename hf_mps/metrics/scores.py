"""The formulas of scikit-learn and scipy, with a result and no warning where theirs is undefined, and of rankings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal

from hf_mps.core.notices import ignoring

Numbers = Sequence[float]
Share = Literal["f1", "precision", "recall"]
TOP = 10
"""Places of a ranking that count."""


def accuracy(predictions: Sequence[int], references: Sequence[int]) -> float:
    """Return the share of rows answered rightly, of sets those without a label too many or too few: accuracy_score."""
    from sklearn.metrics import accuracy_score

    return float(accuracy_score(references, predictions))


def matthews_correlation(predictions: Sequence[int], references: Sequence[int]) -> float:
    """Matthews' phi in [-1, 1], for two labels or more: sklearn.metrics.matthews_corrcoef.

    0.0 where one side holds a single label. scikit-learn warns of a single label in both, which is no mistake here.
    """
    from sklearn.metrics import matthews_corrcoef

    if len(set(predictions)) == 1 or len(set(references)) == 1:
        return 0.0
    return float(matthews_corrcoef(references, predictions))


def averaged(name: Share, predictions: Sequence[int], references: Sequence[int], average: str = "binary") -> float:
    """Return F1, precision or recall as sklearn.metrics computes them, 0.0 where the divisor is 0.

    Both sides hold one label a row or, but for binary, 0 and 1 of shape (rows, labels).

    `average` is binary (of label 1), macro, micro or weighted.
    """
    from sklearn import metrics

    return float(getattr(metrics, f"{name}_score")(references, predictions, average=average, zero_division=0))


def _correlation(name: str, predictions: Numbers, references: Numbers) -> float:
    from scipy import stats

    if not _finite(predictions, references):
        return float("nan")
    if len(set(predictions)) == 1 or len(set(references)) == 1:
        # A constant says nothing about the other side; scipy returns NaN with a warning.
        return 0.0
    # scipy warns of an almost constant column, and computes it to fewer digits.
    with ignoring():
        value = float(getattr(stats, name)(predictions, references)[0])
    return value if value == value else 0.0


def _error(name: str, predictions: Numbers, references: Numbers) -> float:
    from sklearn import metrics

    return float(getattr(metrics, name)(references, predictions)) if _finite(predictions, references) else float("nan")


pearsonr, spearmanr = (partial(_correlation, name) for name in ("pearsonr", "spearmanr"))
"""scipy.stats' r and rho, ties by average rank; 0.0 where one side is constant, NaN where a value is not finite."""
mse, rmse, mae = (partial(_error, f"{name}_error") for name in ("mean_squared", "root_mean_squared", "mean_absolute"))
"""scikit-learn's; NaN where a value is not finite."""


def mean_reciprocal_rank(ranks: Sequence[int], wanted: Sequence[int]) -> float:
    """Return the mean of one over the rank of the right text; a rank beyond 10 counts as 0."""
    return sum(1 / rank for rank in ranks if rank <= TOP) / len(ranks)


def average_precision(predictions: Numbers, references: Numbers) -> float:
    """The precision at each relevant row's place, averaged: sklearn.metrics.average_precision_score of labels 0 and 1.

    NaN where a score is not finite; 0.0 where no row is relevant.
    """
    from sklearn.metrics import average_precision_score

    if not _finite(predictions, references):
        return float("nan")
    return float(average_precision_score(references, predictions)) if any(references) else 0.0


def order(scores: Sequence[float], relevance: Sequence[float]) -> list[int]:
    """Return the numbers of the documents by falling score; NaN comes last.

    Of equal scores the least relevant comes first: who scores all alike has not found anything.
    """
    known = [score if score == score else -math.inf for score in scores]
    return sorted(range(len(known)), key=lambda place: (-known[place], relevance[place]))


def ndcg(scores: Sequence[float], relevance: Sequence[float]) -> float:
    """Return sklearn.metrics.ndcg_score(k=10) of one query, except for equal scores (see `order`).

    0.0 where no document is relevant.
    """
    best = _gain(sorted(relevance, reverse=True))
    return _gain([relevance[place] for place in order(scores, relevance)]) / best if best else 0.0


def reciprocal_rank(scores: Sequence[float], relevance: Sequence[float]) -> float:
    """Return one over the rank of the first relevant document (above 0), 0.0 where none is among the first ten."""
    for rank, place in enumerate(order(scores, relevance)[:TOP], 1):
        if relevance[place] > 0:
            return 1 / rank
    return 0.0


def _gain(relevance: Sequence[float]) -> float:
    return sum(value / math.log2(rank + 1) for rank, value in enumerate(relevance[:TOP], 1))


def _finite(*columns: Numbers) -> bool:
    return all(math.isfinite(value) for column in columns for value in column)
