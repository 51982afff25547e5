"""Which metrics there are, and a few of them loaded to be computed together."""

from __future__ import annotations

import importlib
import inspect
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_mps.errors import UserError, nearest

MODULES = Path(__file__).parent / "modules"

# What each name reports; the first judges a run, so GLUE's pairs list F1 first: MRPC's results are compared by it.
# These compare one label or value a row.
OF_LABELS: dict[str, tuple[str, ...]] = {
    "accuracy": ("accuracy",),
    "matthews_correlation": ("matthews_correlation",),
    "pearsonr": ("pearsonr",),
    "spearmanr": ("spearmanr",),
    "mse": ("mse",),
    **{name: (name,) for name in ("f1", "precision", "recall")},
    **{
        f"{name}/{average}": (f"{name}_{average}",)
        for name in ("f1", "precision", "recall")
        for average in ("macro", "micro", "weighted")
    },
    "glue/cola": ("matthews_correlation",),
    "glue/stsb": ("pearsonr", "spearmanr"),
    "glue/mrpc": ("f1", "accuracy"),
    "glue/qqp": ("f1", "accuracy"),
    **{
        f"glue/{task}": ("accuracy",)
        for task in ("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli")
    },
}
REPORTS: dict[str, tuple[str, ...]] = {
    **OF_LABELS,
    "squad": ("f1", "exact_match"),
    "squad_v2": ("f1", "exact", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1"),
    "sts": ("spearman_cosine", "pearson_cosine"),
    "retrieval": ("cosine_accuracy@1", "cosine_mrr@10"),
    "seqeval": ("overall_f1", "overall_precision", "overall_recall", "overall_accuracy"),
    "wer": ("wer",),
    "cer": ("cer",),
    "rouge": ("rougeL", "rouge1", "rouge2", "rougeLsum"),
    "sacrebleu": ("sacrebleu",),
    "bleu": ("bleu",),
    "chrf": ("chrf",),
}
# Metrics that a task computes itself, from sums over tokens or pairs that no list of answers holds.
OWN: dict[str, tuple[str, ...]] = {
    "perplexity": ("perplexity",),
    "rewards/accuracies": ("rewards/accuracies",),
    "rewards/margins": ("rewards/margins",),
}
TWO_LABELS = ("f1", "precision", "recall")
LOWER_IS_BETTER = ("mse", "wer", "cer", "perplexity")


@dataclass(frozen=True)
class Baseline:
    """What a model that learned nothing scores: in words what it answers, and the metrics."""

    what: str
    metrics: dict[str, float]


class Metrics:
    """A few metrics computed together; `names` as the recipe has them, `main` the one that judges the run."""

    def __init__(self, names: Sequence[str], modules: Sequence[Any]) -> None:
        self.names = tuple(names)
        self._modules = tuple(modules)
        self.main = REPORTS[names[0]][0]
        self.greater_is_better = self.main not in LOWER_IS_BETTER
        self.reported = tuple(dict.fromkeys(number for name in names for number in REPORTS[name]))

    def compute(self, predictions: Any, references: Any) -> dict[str, float]:
        """Return every metric of n predicted labels (or values, for regression) against n references.

        Both are sequences or arrays of shape (n,) or (n, 1); a tensor must be on the CPU. A correlation without spread
        on one side is 0.0, one of NaN or infinite values is NaN. Raises UserError for no rows and for more labels than
        a two-label metric takes, ValueError where the lengths differ.
        """
        answers, truths = _column(predictions), _column(references)
        if len(answers) != len(truths):
            raise ValueError(f"{len(answers)} predictions for {len(truths)} references")
        if not answers:
            raise UserError(f"there is no row to compute {', '.join(self.names)} on: the evaluation data is empty")
        values: dict[str, float] = {}
        for module in self._modules:
            values |= module.compute(predictions=answers, references=truths)
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
            raise UserError(f"{name} is for two labels and this data has {num_labels}: {other_averages(name)}")
    return Metrics(wanted, [_module(name) for name in wanted])


def other_averages(name: str) -> str:
    """The sentence that sends a user of a two-label metric to the ones for many labels."""
    return f"use {name}/macro, {name}/micro or {name}/weighted"


def _module(name: str) -> Any:
    """An instance of the metric's evaluate.Metric class.

    The class is imported from this package. `evaluate.load(folder)` would make the same one, but first copies the file
    into HF_MODULES_CACHE, not atomically, where a killed run leaves half a file for good and a read-only home ends in
    PermissionError; and it makes a folder in HF_METRICS_CACHE that `keep_in_memory` never uses.
    """
    import evaluate

    module_name, _, config = name.partition("/")
    module = importlib.import_module(f"{__package__}.modules.{module_name}.{module_name}")
    kinds: list[Any] = [
        kind
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, evaluate.Metric) and kind.__module__ == module.__name__
    ]
    with tempfile.TemporaryDirectory(prefix="hf-mps-metrics-") as folder:
        return kinds[0](config_name=config or None, cache_dir=folder, keep_in_memory=True)


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
