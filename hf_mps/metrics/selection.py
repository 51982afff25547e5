"""The metrics that a recipe asks for: chosen among its task's, and loaded to be computed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hf_mps.core import extras
from hf_mps.core.errors import UserError, nearest
from hf_mps.metrics import scores
from hf_mps.metrics.table import LOWER_IS_BETTER, METRICS, REPORTS, TWO_LABELS, Metric, computed, of_kind

# What Trainer and its speed_metrics add to the log of every evaluation, whatever the data set is called.
TIMINGS = tuple(
    f"_{name}"
    for name in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")
)


@dataclass(frozen=True)
class Baseline:
    """The score of a model that learned nothing: its answer in words, and the metrics."""

    what: str
    metrics: dict[str, float]


class Metrics:
    """Metrics computed together; `names` are the recipe's, `main` is the one that judges the run."""

    def __init__(self, named: Sequence[tuple[str, Metric]]) -> None:
        self.names = tuple(name for name, _ in named)
        self._metrics = tuple(metric for _, metric in named)
        self.main = self._metrics[0].reports[0]
        self.greater_is_better = self.main not in LOWER_IS_BETTER
        self.reported = tuple(dict.fromkeys(number for metric in self._metrics for number in metric.reports))

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return every metric of n predicted labels (or values, for regression) against n references.

        Both are sequences or arrays of shape (n,) or (n, 1); a tensor must be on the CPU. A correlation without spread
        on one side is 0.0, one of NaN or infinite values is NaN. Raises UserError for no rows and for more labels than
        a two-label metric takes, ValueError where the lengths differ.
        """
        predicted, truths = _column(predictions), _column(references)
        if len(predicted) != len(truths):
            raise ValueError(f"{len(predicted)} predictions for {len(truths)} references")
        if not predicted:
            raise UserError(f"there is no row to compute {', '.join(self.names)} on: the evaluation data is empty")
        values: dict[str, float] = {}
        for metric in self._metrics:
            if metric.compute is not None:
                values |= metric.compute(predicted, truths)
        return values

    def baseline(self, references: Any, *, train: Any, regression: bool = False, names: Sequence[str] = ()) -> Baseline:
        """Return the score of one constant answer on `references`: the majority label of `train`, or its mean.

        `names` are the classes by their ids, for the description.
        """
        seen = _column(train)
        if not seen:
            raise UserError("the training data is empty: there is no majority label to compare with")
        answer: Any
        if regression:
            answer = sum(seen) / len(seen)
            what = f"always answers {answer:.4g}, the mean of the training rows"
        else:
            # The smaller label wins a tie, so that the order of the rows does not matter.
            answer, count = min(Counter(seen).items(), key=lambda item: (-item[1], item[0]))
            said = names[answer] if names else answer
            what = f"always answers {said}, the label of {count / len(seen):.1%} of the training rows"
        truths = _column(references)
        return Baseline(what, self.compute([answer] * len(truths), truths))


@dataclass
class Chosen:
    """Metrics that a task computes itself, by name.

    An evaluation must give the numbers `reported`; `main`, the first, judges the run.
    """

    names: tuple[str, ...]
    reported: tuple[str, ...]
    main: str
    greater_is_better: bool

    def of(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return only the chosen numbers, in their order."""
        return {name: float(values[name]) for name in self.reported}


class Unmeasured(Metrics):
    """Metrics that are not computed: every number is 0.0, and no package is needed."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([(name, METRICS[name]) for name in names])

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return dict.fromkeys(self.reported, 0.0)


_UNMEASURED: ContextVar[bool] = ContextVar("_UNMEASURED", default=False)


@contextmanager
def unmeasured() -> Iterator[None]:
    """Let `load` return metrics that compute nothing, for a look at a training step alone (`hf-mps plan`, `audit`)."""
    before = _UNMEASURED.set(True)
    try:
        yield
    finally:
        _UNMEASURED.reset(before)


def is_metric(name: str) -> bool:
    """Return whether an entry of an evaluation's log measures the model, and not the evaluation itself."""
    return name not in ("epoch", "step") and not name.endswith(TIMINGS)


def of_log(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation's log, without `eval_`."""
    return {
        name.removeprefix("eval_"): value
        for name, value in logs.items()
        if name.startswith("eval_") and isinstance(value, (int, float)) and is_metric(name)
    }


def available() -> list[str]:
    """Return every name that a recipe's `metrics` may have, sorted: those that `load` takes, and those of single
    tasks.
    """
    return sorted(REPORTS)


def load(names: Sequence[str], *, num_labels: int | None = None) -> Metrics:
    """Load metrics by name, `accuracy`, `f1`, `f1/macro`, `glue/mrpc`, …; the first of them judges the run.

    `table.METRICS` has the names. With `num_labels` a two-label metric on more labels is refused now, not after the
    first epoch. Touches neither the network nor evaluate's caches. Raises UserError for an unknown name or an empty
    list.
    """
    if isinstance(names, str):
        names = [names]
    if not names:
        raise UserError(f"metrics is empty; allowed: {', '.join(computed())}")
    unique_names = list(dict.fromkeys(names))
    for name in unique_names:
        if name not in computed():
            near = nearest(name, computed())
            raise UserError(f"'{name}' is not a known metric; allowed: {', '.join(computed())}{near}")
        if name in TWO_LABELS and num_labels is not None and num_labels > 2:
            raise UserError(f"{name} is for two labels and this data has {num_labels}: {scores.other_averages(name)}")
    if _UNMEASURED.get():
        return Unmeasured(unique_names)
    for name in unique_names:
        needs = METRICS[name].needs
        if needs is not None and needs.missing:
            way_on = extras.install(needs.extra)
            raise UserError(f"metrics has {name}, and {needs.package} is not installed; next: {way_on}")
    return Metrics([(name, METRICS[name]) for name in unique_names])


def choose(asked: Sequence[str] | None, allowed: Sequence[str], task: str) -> Chosen:
    """Return the metrics `asked` for, or all of `allowed`, those that `task` can compute.

    Raises UserError for a metric that it cannot.
    """
    names = tuple(dict.fromkeys(asked or allowed))
    for name in names:
        if name not in allowed:
            known = f"{', '.join(allowed)}{nearest(name, allowed)}"
            raise UserError(f"metrics has '{name}', which {task} does not compute; allowed: {known}")
    reported = tuple(number for name in names for number in REPORTS[name])
    return Chosen(names, reported, reported[0], reported[0] not in LOWER_IS_BETTER)


def of_labels(names: Sequence[str], task: str, num_labels: int) -> Metrics:
    """Load metrics that compare one label a row, or one value a row where `num_labels` is 0; the first judges the run.

    Raises UserError for a metric of another kind (of texts, of classes where there are values, …), and as `load`.
    """
    if num_labels:
        choose(names, of_kind("labels"), task)
        return load(names, num_labels=num_labels)
    choose(names, of_kind("values"), f"{task} with labels that are numbers (regression)")
    return load(names)


def _column(values: Any) -> list[Any]:
    """Return a list of Python numbers from a sequence or array of shape (n,) or (n, 1); rows of tags are unchanged.

    Raises ValueError for another shape.
    """
    import numpy

    rows = values if isinstance(values, list) else []
    if rows and all(isinstance(row, list) and all(isinstance(tag, str) for tag in row) for row in rows):
        return rows
    array = numpy.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(f"metrics take one number a row, not an array of shape {array.shape}")
    column: list[Any] = array.tolist()
    return column
