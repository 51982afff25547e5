"""Which metrics there are, and a few of them loaded to be computed together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from hf_mps.core import extras
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.metrics import edits, generation, scores, tags
from hf_mps.finetune.metrics.as_evaluate import answers
from hf_mps.finetune.metrics.needs import JIWER, ROUGE, SACREBLEU, Needs

TWO_LABELS = ("f1", "precision", "recall")
Compute = Callable[[Any, Any], dict[str, float]]


@dataclass(frozen=True)
class Metric:
    """The numbers that a metric reports, the first of which judges a run, and how it computes them."""

    reports: tuple[str, ...]
    compute: Compute
    needs: Needs | None = None


def _numbers(**formulas: Callable[[Any, Any], float]) -> Metric:
    def compute(predictions: Any, references: Any) -> dict[str, float]:
        return {name: float(formula(predictions, references)) for name, formula in formulas.items()}

    return Metric(tuple(formulas), compute)


def _averaged(name: Any, average: str = "binary") -> Callable[[Any, Any], float]:
    return lambda predictions, references: scores.averaged(name, predictions, references, average)


def _only(reports: tuple[str, ...], compute: Callable[..., dict[str, Any]]) -> Metric:
    def of(predictions: Any, references: Any) -> dict[str, float]:
        return {name: value for name, value in compute(predictions, references).items() if name in reports}

    return Metric(reports, of)


def _mean_reciprocal_rank(ranks: Sequence[int], wanted: Sequence[int]) -> float:
    """The mean of one over the rank at which the right text came; a rank beyond 10 counts as 0."""
    return sum(1 / rank for rank in ranks if rank <= 10) / len(ranks)


# What each name reports; the first judges a run, so GLUE's pairs list F1 first: MRPC's results are compared by it.
# These compare one label or value a row.
_OF_LABELS: dict[str, Metric] = {
    "accuracy": _numbers(accuracy=scores.accuracy),
    "matthews_correlation": _numbers(matthews_correlation=scores.matthews_correlation),
    "pearsonr": _numbers(pearsonr=scores.pearsonr),
    "spearmanr": _numbers(spearmanr=scores.spearmanr),
    "mse": _numbers(mse=scores.mse),
    **{name: _numbers(**{name: _averaged(name)}) for name in TWO_LABELS},
    **{
        f"{name}/{average}": _numbers(**{f"{name}_{average}": _averaged(name, average)})
        for name in TWO_LABELS
        for average in ("macro", "micro", "weighted")
    },
    "glue/cola": _numbers(matthews_correlation=scores.matthews_correlation),
    "glue/stsb": _numbers(pearsonr=scores.pearsonr, spearmanr=scores.spearmanr),
    **{f"glue/{task}": _numbers(f1=_averaged("f1"), accuracy=scores.accuracy) for task in ("mrpc", "qqp")},
    **{
        f"glue/{task}": _numbers(accuracy=scores.accuracy)
        for task in ("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli")
    },
}
METRICS: dict[str, Metric] = {
    **_OF_LABELS,
    "squad": _only(("f1", "exact_match"), answers.squad),
    "squad_v2": _only(
        ("f1", "exact", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"),
        answers.squad_v2,
    ),
    # sentence-transformers' names: cosines against scores of any scale.
    "sts": _numbers(spearman_cosine=scores.spearmanr, pearson_cosine=scores.pearsonr),
    # Predictions are the ranks at which the right text came, references the rank wanted, 1 in every row.
    "retrieval": _numbers(**{"cosine_accuracy@1": scores.accuracy, "cosine_mrr@10": _mean_reciprocal_rank}),
    "seqeval": Metric(("overall_f1", "overall_precision", "overall_recall", "overall_accuracy"), tags.seqeval),
    "wer": Metric(("wer",), lambda *texts: {"wer": edits.wer(*texts)}, JIWER),
    "cer": Metric(("cer",), lambda *texts: {"cer": edits.cer(*texts)}, JIWER),
    "rouge": Metric(("rougeL", "rouge1", "rouge2", "rougeLsum"), generation.rouge, ROUGE),
    "sacrebleu": Metric(("sacrebleu",), generation.sacrebleu, SACREBLEU),
    "bleu": Metric(("bleu",), generation.bleu, SACREBLEU),
    "chrf": Metric(("chrf",), generation.chrf, SACREBLEU),
}
OF_LABELS: dict[str, tuple[str, ...]] = {name: metric.reports for name, metric in _OF_LABELS.items()}
REPORTS: dict[str, tuple[str, ...]] = {name: metric.reports for name, metric in METRICS.items()}
# Metrics that a task computes itself, from sums over tokens or pairs that no list of answers holds.
OWN: dict[str, tuple[str, ...]] = {
    "perplexity": ("perplexity",),
    "rewards/accuracies": ("rewards/accuracies",),
    "rewards/margins": ("rewards/margins",),
}
# What Trainer and its speed_metrics add to the log of every evaluation, whatever the data set is called.
TIMINGS = tuple(
    f"_{name}"
    for name in ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "jit_compilation_time")
)
LOWER_IS_BETTER = ("mse", "wer", "cer", "perplexity")


@dataclass(frozen=True)
class Baseline:
    """What a model that learned nothing scores: in words what it answers, and the metrics."""

    what: str
    metrics: dict[str, float]


class Metrics:
    """A few metrics computed together; `names` as the recipe has them, `main` the one that judges the run."""

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
            values |= metric.compute(predicted, truths)
        return values

    def baseline(self, references: Any, *, train: Any, regression: bool = False, names: Sequence[str] = ()) -> Baseline:
        """Return what one constant answer scores on `references`: the majority label of `train`, or its mean.

        `names` are the classes by their ids, for the words.
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


class Unmeasured(Metrics):
    """Metrics that nobody will compute: every number is 0.0, and no package is needed for it."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([(name, METRICS[name]) for name in names])

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        return dict.fromkeys(self.reported, 0.0)


_UNMEASURED: ContextVar[bool] = ContextVar("_UNMEASURED", default=False)


@contextmanager
def unmeasured() -> Iterator[None]:
    """Let `load` give metrics that compute nothing, for who looks at a training step alone (`hf-mps plan`, `audit`)."""
    before = _UNMEASURED.set(True)
    try:
        yield
    finally:
        _UNMEASURED.reset(before)


def is_metric(name: str) -> bool:
    """Whether an entry of an evaluation's log is a figure of the model, and none of Trainer's about the evaluation."""
    return name not in ("epoch", "step") and not name.endswith(TIMINGS)


def of_log(logs: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of an evaluation's log, without `eval_`."""
    return {
        name.removeprefix("eval_"): value
        for name, value in logs.items()
        if name.startswith("eval_") and isinstance(value, (int, float)) and is_metric(name)
    }


def available() -> list[str]:
    """Every name that a recipe's `metrics` may have, sorted: those that `load` takes, and those of single tasks."""
    return sorted({**REPORTS, **OWN})


def load(names: Sequence[str], *, num_labels: int | None = None) -> Metrics:
    """Load metrics by name, `accuracy`, `f1`, `f1/macro`, `glue/mrpc`, …; the first of them judges the run.

    `REPORTS` has the names. With `num_labels` a two-label metric on more labels is refused now, not after the first
    epoch. Touches neither the network nor evaluate's caches. Raises UserError for an unknown name or an empty list.
    """
    if isinstance(names, str):
        names = [names]
    if not names:
        raise UserError(f"metrics is empty; allowed: {', '.join(sorted(REPORTS))}")
    wanted = list(dict.fromkeys(names))
    for name in wanted:
        if name not in REPORTS:
            raise UserError(
                f"'{name}' is not a metric it knows; allowed: {', '.join(sorted(REPORTS))}{nearest(name, REPORTS)}"
            )
        if name in TWO_LABELS and num_labels is not None and num_labels > 2:
            raise UserError(f"{name} is for two labels and this data has {num_labels}: {scores.other_averages(name)}")
    if _UNMEASURED.get():
        return Unmeasured(wanted)
    return Metrics([(name, _found(name)) for name in wanted])


def _found(name: str) -> Metric:
    metric = METRICS[name]
    needs = metric.needs
    if needs is not None and needs.missing:
        raise UserError(
            f"metrics has {name}, and {needs.package} is not installed; next: {extras.install(needs.extra)}"
        )
    return metric


def _column(values: Any) -> list[Any]:
    """A list of Python numbers from a sequence or an array of shape (n,) or (n, 1); rows of tags are left as they are.

    Raises ValueError for another shape.
    """
    import numpy

    if isinstance(values, list) and values and isinstance(values[0], list) and all(map(_is_tags, values)):
        return values
    array = numpy.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise ValueError(f"metrics take one number a row, not an array of shape {array.shape}")
    column: list[Any] = array.tolist()
    return column


def _is_tags(row: Any) -> bool:
    return isinstance(row, list) and all(isinstance(tag, str) for tag in row)
