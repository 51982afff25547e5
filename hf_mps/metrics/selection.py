"""The metrics that a recipe asks for, of its task's: of one label or value a row, of sets of labels, of tags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hf_mps.core import extras
from hf_mps.core.errors import UserError, nearest
from hf_mps.metrics import seqeval
from hf_mps.metrics.table import LOWER_IS_BETTER, METRICS, REPORTS, TWO_LABELS, of_kind

# What Trainer and its speed_metrics add to the log of every evaluation, whatever the data set is called.
TIMINGS = tuple(
    f"_{name}"
    for name in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")
)


OF_SETS = ("f1/micro", "f1/macro", "exact_match")
Rows = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Baseline:
    """The score of a model that learned nothing: its answer in words, and the metrics."""

    what: str
    metrics: dict[str, float]


@dataclass
class Chosen:
    """Metrics by name, as a recipe has them; an evaluation gives the numbers `reported`, the first of which judges the
    run.
    """

    names: tuple[str, ...]
    reported: tuple[str, ...]

    @property
    def main(self) -> str:
        """The number that judges the run, without `eval_`."""
        return self.reported[0]

    @property
    def greater_is_better(self) -> bool:
        """Return whether a larger main number is a better one."""
        return self.main not in LOWER_IS_BETTER

    def of(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return only the chosen numbers, in their order."""
        return {name: float(values[name]) for name in self.reported}

    def computed(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return the numbers of those metrics that have a formula; the task computes the others."""
        values: dict[str, float] = {}
        for compute in filter(None, (METRICS[name].compute for name in self.names)):
            values |= compute(predictions, references)
        return values


@dataclass
class Metrics(Chosen):
    """Metrics computed together. Where they are not `measured` every number is 0.0, and no package is needed."""

    measured: bool = True

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return every metric of n predicted labels (or values, for regression) against n references.

        Both are sequences or arrays of shape (n,) or (n, 1), n at least 1; a tensor must be on the CPU. A correlation
        without spread on one side is 0.0, one of NaN or infinite values is NaN.
        """
        return self._values(_column(predictions), _column(references))

    def _values(self, predicted: Any, truths: Any) -> dict[str, float]:
        return self.computed(predicted, truths) if self.measured else dict.fromkeys(self.reported, 0.0)

    def baseline(self, references: Any, *, train: Any, regression: bool = False, names: Sequence[str] = ()) -> Baseline:
        """Return the score of one constant answer on `references`: the majority label of `train`, or its mean.

        `names` are the classes by their ids, for the description.
        """
        seen = _column(train)
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


class SetMetrics(Metrics):
    """Metrics over the sets of labels of rows: scikit-learn's over a table of 0 and 1, and how often a row is right."""

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return every metric of predicted against true labels, both of 0 and 1 and of shape (rows, labels)."""
        import numpy

        return self._values(*(numpy.asarray(table).astype(int) for table in (predictions, references)))

    def baseline(self, references: Any, *, train: Any, regression: bool = False, names: Sequence[str] = ()) -> Baseline:
        """Return the score of one set as the only answer: the labels of half of `train`, or the commonest."""
        import numpy

        shares = numpy.asarray(train).mean(axis=0)
        answer = shares >= 0.5
        answer[shares.argmax()] = True
        shown = [f"{names[place]} ({shares[place]:.1%})" for place in numpy.flatnonzero(answer)[:4]]
        more = ", …" if answer.sum() > len(shown) else ""
        what = f"always answers {', '.join(shown)}{more}, the commonest of the training rows"
        return Baseline(what, self.compute(numpy.broadcast_to(answer, numpy.shape(references)), references))


@dataclass
class TagMetrics(Chosen):
    """Metrics of rows of tags; `seqeval` adds precision, recall and f1 of each kind of name (`PER_f1`)."""

    kinds: tuple[str, ...]
    tag_names: tuple[str, ...]
    words: Metrics | None

    def compute(self, predictions: Rows, references: Rows) -> dict[str, float]:
        """Return every metric of rows of predicted tags against the true ones, of equal lengths.

        A kind of name on neither side scores 0. Raises ValueError where lengths differ.
        """
        values: dict[str, float] = {}
        if "seqeval" in self.names:
            read = ([[seqeval.iobes(tag) for tag in row] for row in rows] for rows in (predictions, references))
            report: dict[str, Any] = dict(load(["seqeval"]).compute(*read))
            overall = {name: value for name, value in report.items() if name.startswith("overall_")}
            values |= overall | dict.fromkeys(_of_kinds(self.kinds), 0.0)
            for kind in self.kinds:
                values |= {f"{kind}_{number}": report[kind][number] for number in seqeval.OVERALL if kind in report}
        if self.words is not None:
            ids = {name: number for number, name in enumerate(self.tag_names)}
            flat = [[ids[tag] for row in rows for tag in row] for rows in (predictions, references)]
            values |= self.words.compute(*flat)
        return self.of(values)

    def baseline(self, references: Rows, train: Rows) -> Baseline:
        """Return the score of the training rows' most frequent tag as the only answer."""
        counts = Counter(tag for row in train for tag in row)
        answer, count = min(counts.items(), key=lambda item: (-item[1], item[0]))
        what = f"always answers {answer}, the tag of {count / counts.total():.1%} of the training words"
        return Baseline(what, self.compute([[answer] * len(row) for row in references], references))


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

    `table.computed` has the names. With `num_labels` a two-label metric on more labels is refused now, not after the
    first epoch. Touches neither the network nor evaluate's caches. Raises UserError where a package is missing.
    """
    unique_names = list(dict.fromkeys(names))
    for name in unique_names:
        if name in TWO_LABELS and num_labels is not None and num_labels > 2:
            instead = f"use {name}/macro, {name}/micro or {name}/weighted"
            raise UserError(f"{name} is for two labels and this data has {num_labels}: {instead}")
    # A step that is only looked at needs neither the metric nor its package.
    measured = not _UNMEASURED.get()
    for name in unique_names if measured else ():
        needs = METRICS[name].needs
        if needs is not None and needs.missing:
            way_on = extras.install(needs.extra)
            raise UserError(f"metrics has {name}, and {needs.package} is not installed; next: {way_on}")
    return Metrics(tuple(unique_names), _reported(unique_names), measured)


def choose(asked: Sequence[str] | None, allowed: Sequence[str], task: str) -> Chosen:
    """Return the metrics `asked` for, or all of `allowed`, those that `task` can compute.

    Raises UserError for a metric that it cannot.
    """
    names = tuple(dict.fromkeys(asked or allowed))
    for name in names:
        if name not in allowed:
            known = f"{', '.join(allowed)}{nearest(name, allowed)}"
            raise UserError(f"metrics has '{name}', which {task} does not compute; allowed: {known}")
    return Chosen(names, _reported(names))


def of_labels(names: Sequence[str], task: str, num_labels: int) -> Metrics:
    """Load metrics that compare one label a row, or one value a row where `num_labels` is 0; the first judges the run.

    Raises UserError for a metric of another kind (of texts, of classes where there are values, …), and as `load`.
    """
    if num_labels:
        choose(names, of_kind("labels"), task)
        return load(names, num_labels=num_labels)
    choose(names, of_kind("values"), f"{task} with labels that are numbers (regression)")
    return load(names)


def of_sets(asked: Sequence[str] | None, task: str) -> SetMetrics:
    """Load metrics of several labels a row, OF_SETS where the recipe names none. Raises UserError as `load`."""
    chosen = choose(asked or OF_SETS, of_kind("sets"), f"{task} with several labels a row")
    return SetMetrics(chosen.names, chosen.reported, not _UNMEASURED.get())


def of_tags(asked: Sequence[str] | None, tag_names: Sequence[str], task: str) -> TagMetrics:
    """Return the metrics asked for; by default seqeval's where tags mark names, else accuracy and macro F1.

    Raises UserError for a metric that tags do not have, and for seqeval over tags that mark no names.
    """
    chunked = seqeval.is_chunked(tag_names)
    usual = ["seqeval"] if chunked else ["accuracy", "f1/macro"]
    chosen = choose(asked or usual, ("seqeval", *of_kind("words")), task)
    if "seqeval" in chosen.names and not chunked:
        shown = ", ".join(tag_names[:6]) + (", …" if len(tag_names) > 6 else "")
        told = f"metrics has seqeval, which counts names, and the tags ({shown}) mark none (B-PER, I-PER, O)"
        raise UserError(f"{told}; allowed: {', '.join(of_kind('words'))}")
    others = [name for name in chosen.names if name != "seqeval"]
    words = load(others, num_labels=len(tag_names)) if others else None
    kinds = tuple(seqeval.kinds(tag_names))
    reported = (*chosen.reported, *(_of_kinds(kinds) if "seqeval" in chosen.names else ()))
    return TagMetrics(chosen.names, reported, kinds, tuple(tag_names), words)


def _of_kinds(kinds: Iterable[str]) -> list[str]:
    return [f"{kind}_{number}" for kind in kinds for number in seqeval.OVERALL]


def _reported(names: Iterable[str]) -> tuple[str, ...]:
    """Return every number that metrics report, each once."""
    return tuple(dict.fromkeys(number for name in names for number in REPORTS[name]))


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
