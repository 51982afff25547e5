"""The metrics of several labels a row: scikit-learn's over a table of 0 and 1, and how often a whole row is right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.metrics.selection import Baseline, Metrics, Unmeasured, choose, load
from hf_mps.metrics.table import LOWER_IS_BETTER, METRICS, of_kind

DEFAULT = ("f1/micro", "f1/macro", "exact_match")


class SetMetrics:
    """Metrics computed together over the sets of labels of rows; `main` is the one that judges the run."""

    def __init__(self, inner: Metrics) -> None:
        self._inner = inner
        self.names, self.main, self.reported = inner.names, inner.main, inner.reported
        self.greater_is_better = inner.main not in LOWER_IS_BETTER

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return every metric of predicted against true labels, both of 0 and 1 and of shape (rows, labels).

        Raises UserError for no rows, ValueError where the shapes differ.
        """
        import numpy

        if isinstance(self._inner, Unmeasured):
            return dict.fromkeys(self.reported, 0.0)
        answers, truths = (numpy.asarray(table).astype(int) for table in (predictions, references))
        if answers.shape != truths.shape:
            raise ValueError(f"predictions of shape {answers.shape} for references of shape {truths.shape}")
        if not len(truths):
            raise UserError(f"there is no row to compute {', '.join(self.names)} on: the evaluation data is empty")
        values: dict[str, float] = {}
        for name in self.names:
            if (compute := METRICS[name].compute) is not None:
                values |= compute(answers, truths)
        return values

    def baseline(self, references: Any, *, train: Any, names: Sequence[str]) -> Baseline:
        """Return the score of one set as the only answer: the labels of half of `train`, or the commonest."""
        import numpy

        shares = numpy.asarray(train).mean(axis=0)
        answer = shares >= 0.5
        answer[shares.argmax()] = True
        shown = [f"{names[place]} ({shares[place]:.1%})" for place in numpy.flatnonzero(answer)[:4]]
        more = ", …" if answer.sum() > len(shown) else ""
        what = f"always answers {', '.join(shown)}{more}, the commonest of the training rows"
        return Baseline(what, self.compute(numpy.broadcast_to(answer, numpy.shape(references)), references))


def of_sets(asked: Sequence[str] | None, task: str) -> SetMetrics:
    """Load metrics of several labels a row, `DEFAULT` where the recipe names none.

    Raises UserError as `load`.
    """
    chosen = choose(asked or DEFAULT, of_kind("sets"), f"{task} with several labels a row")
    return SetMetrics(load(chosen.names))
