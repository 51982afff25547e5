"""The one table of metrics: those of recipes and those with `evaluate`'s interface. It imports none of their libraries.

A metric is a row here and its formula: `scores`, `squad`, `seqeval` and `texts` compute a recipe's, and with `labels`
and `pixels` those that old scripts ask of `evaluate`, under its names and with its keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from hf_mps.metrics import labels, pixels, scores, seqeval, squad, texts

Rows = Literal["labels", "values", "words", "sets"]
Compute = Callable[[Any, Any], dict[str, Any]]
Columns = Sequence[tuple[Any, Any]]


class Needs(NamedTuple):
    """A package by its name on PyPI and for Python, and the extra of hf_mps that brings it."""

    package: str
    module: str
    extra: str

    @property
    def missing(self) -> bool:
        """Return whether it is not installed."""
        return find_spec(self.module) is None


@dataclass(frozen=True)
class Interface:
    """`evaluate`'s form of a metric: `compute(predictions, references, **keywords)`, and the types of its columns.

    `columns` are the forms that a row may have, each for predictions and references: a name of `as_evaluate.TYPES`, in
    a list where there are several of it. `configs` names other columns by configuration, `only` the configurations
    without which there is no metric. `by_config` hands the configuration to `compute`, `numpy` hands it arrays.
    """

    compute: Callable[..., Any]
    columns: Columns
    configs: Mapping[str, Columns] | None = None
    only: tuple[str, ...] = ()
    by_config: bool = False
    numpy: bool = False


@dataclass(frozen=True)
class Metric:
    """A row of the table: the numbers that a recipe's metric reports, the first of which judges a run.

    `compute` returns them from predictions and references, one a row; without it a task computes them itself, from sums
    that no list of answers holds. `of` says which tasks may ask for it: of one label, one value a row, of tagged words
    or of sets of labels.
    """

    reports: tuple[str, ...] = ()
    compute: Compute | None = None
    of: tuple[Rows, ...] = ()
    needs: Needs | None = None
    lower_is_better: bool = False
    evaluate: Interface | None = None


def _numbers(
    formulas: Mapping[str, Callable[[Any, Any], float]],
    of: tuple[Rows, ...] = (),
    evaluate: Interface | None = None,
    lower_is_better: bool = False,
    needs: Needs | None = None,
) -> Metric:
    """Return a metric of formulas that each give one number, by the numbers' names."""

    def compute(predictions: Any, references: Any) -> dict[str, float]:
        return {name: float(formula(predictions, references)) for name, formula in formulas.items()}

    return Metric(tuple(formulas), compute, of, needs, lower_is_better, evaluate)


def _only(reports: tuple[str, ...], compute: Callable[..., dict[str, Any]]) -> Compute:
    def of(predictions: Any, references: Any) -> dict[str, float]:
        return {name: value for name, value in compute(predictions, references).items() if name in reports}

    return of


def _score_of(corpus: Callable[..., dict[str, Any]]) -> Callable[[Any, Any], float]:
    return lambda predictions, references: float(corpus(predictions, references)["score"])


def _averaged(name: Any, average: str = "binary") -> Callable[[Any, Any], float]:
    return lambda predictions, references: scores.averaged(name, predictions, references, average)


ROUGE = Needs("rouge-score", "rouge_score", "generation")
SACREBLEU = Needs("sacrebleu", "sacrebleu", "generation")
JIWER = Needs("jiwer", "jiwer", "audio")
TWO_LABELS = ("f1", "precision", "recall")
GLUE = ("sst2", "mnli", "mnli_mismatched", "mnli_matched", "cola", "stsb", "mrpc", "qqp", "qnli", "rte", "wnli", "hans")
SQUAD = ("f1", "exact_match")
SQUAD_V2 = ("f1", "exact", "HasAns_exact", "HasAns_f1", "NoAns_exact", "NoAns_f1")
SEQEVAL = ("overall_f1", "overall_precision", "overall_recall", "overall_accuracy")
_LABELS: Columns = [("int32", "int32")]
_MULTILABEL: Mapping[str, Columns] = {"multilabel": [(["int32"], ["int32"])]}
_VALUES: Columns = [("float32", "float32")]
_LISTS: Mapping[str, Columns] = {"multilist": [(["float32"], ["float32"])]}
_TEXTS: Columns = [("string", "string")]
# A row's references in a list, or its only one as it is.
_SEVERAL: Columns = [("string", ["string"]), ("string", "string")]
# GLUE's pairs list F1 first: MRPC's results are compared by it.
PAIRS = {"f1": _averaged("f1"), "accuracy": scores.accuracy}
REWARDS = ("rewards/accuracies", "rewards/margins", "reward", "completions/mean_length")

METRICS: dict[str, Metric] = {
    "accuracy": _numbers(
        {"accuracy": scores.accuracy}, ("labels", "words"), Interface(labels.accuracy, _LABELS, _MULTILABEL)
    ),
    "matthews_correlation": _numbers(
        {"matthews_correlation": scores.matthews_correlation},
        ("labels",),
        Interface(labels.matthews_correlation, _LABELS, _MULTILABEL),
    ),
    "pearsonr": _numbers({"pearsonr": scores.pearsonr}, ("labels", "values"), Interface(labels.pearsonr, _VALUES)),
    "spearmanr": _numbers({"spearmanr": scores.spearmanr}, ("labels", "values"), Interface(labels.spearmanr, _VALUES)),
    "mse": _numbers(
        {"mse": scores.mse}, ("labels", "values"), Interface(labels.mse, _VALUES, _LISTS), lower_is_better=True
    ),
    "rmse": _numbers({"rmse": scores.rmse}, ("labels", "values"), lower_is_better=True),
    "mae": _numbers(
        {"mae": scores.mae}, ("labels", "values"), Interface(labels.mae, _VALUES, _LISTS), lower_is_better=True
    ),
    **{
        name: _numbers({name: _averaged(name)}, ("labels",), Interface(getattr(labels, name), _LABELS, _MULTILABEL))
        for name in TWO_LABELS
    },
    **{
        f"{name}/{average}": _numbers({f"{name}_{average}": _averaged(name, average)}, ("labels", "words", "sets"))
        for name in TWO_LABELS
        for average in ("macro", "micro", "weighted")
    },
    "exact_match": _numbers({"exact_match": scores.accuracy}, ("sets",)),
    "glue/cola": _numbers({"matthews_correlation": scores.matthews_correlation}, ("labels",)),
    "glue/stsb": _numbers({"pearsonr": scores.pearsonr, "spearmanr": scores.spearmanr}, ("labels", "values")),
    **dict.fromkeys(("glue/mrpc", "glue/qqp"), _numbers(PAIRS, ("labels",))),
    **{
        f"glue/{task}": _numbers({"accuracy": scores.accuracy}, ("labels",))
        for task in ("sst2", "mnli", "mnli_matched", "mnli_mismatched", "qnli", "rte", "wnli")
    },
    "glue": Metric(
        evaluate=Interface(labels.glue, [("int64", "int64")], {"stsb": _VALUES}, only=GLUE, by_config=True, numpy=True)
    ),
    "xnli": Metric(evaluate=Interface(labels.plain_accuracy, [("int64", "int64")], {"sts-b": _VALUES}, numpy=True)),
    "squad": Metric(SQUAD, _only(SQUAD, squad.squad), evaluate=Interface(squad.squad, [("answer", "truths")])),
    "squad_v2": Metric(
        SQUAD_V2, _only(SQUAD_V2, squad.squad_v2), evaluate=Interface(squad.squad_v2, [("answer or none", "truths")])
    ),
    # sentence-transformers' names: cosines against scores of any scale.
    "sts": _numbers({"spearman_cosine": scores.spearmanr, "pearson_cosine": scores.pearsonr}),
    # Predictions are the ranks at which the right text came, references the rank wanted, 1 in every row.
    "retrieval": _numbers({"cosine_accuracy@1": scores.accuracy, "cosine_mrr@10": scores.mean_reciprocal_rank}),
    # The same by inner products, and how many dimensions of a text are not 0, of queries and documents alike.
    "sparse_retrieval": _numbers({"dot_accuracy@1": scores.accuracy, "dot_mrr@10": scores.mean_reciprocal_rank}),
    "active_dims": Metric(("active_dims",), lower_is_better=True),
    # Of queries with documents; the task has the scores by query.
    "rerank": Metric(("ndcg@10", "mrr@10")),
    "average_precision": _numbers({"average_precision": scores.average_precision}),
    "seqeval": Metric(
        SEQEVAL,
        partial(seqeval.seqeval, zero_division=0),
        evaluate=Interface(seqeval.seqeval, [(["string"], ["string"])]),
    ),
    **{
        name: _numbers({name: rate}, (), Interface(rate, _TEXTS), lower_is_better=True, needs=JIWER)
        for name, rate in (("wer", texts.wer), ("cer", texts.cer))
    },
    **{
        name: _numbers({name: _score_of(corpus)}, (), Interface(corpus, _SEVERAL), needs=SACREBLEU)
        for name, corpus in (("sacrebleu", texts.sacrebleu), ("chrf", texts.chrf))
    },
    "rouge": Metric(
        ("rougeL", "rouge1", "rouge2", "rougeLsum"),
        texts.mean_rouge,
        needs=ROUGE,
        evaluate=Interface(texts.rouge, _SEVERAL),
    ),
    "bleu": Metric(
        ("bleu",),
        texts.unsmoothed_bleu,
        needs=SACREBLEU,
        # The last form is that of datasets 1 and 2: tokens, not texts.
        evaluate=Interface(texts.bleu, [*_SEVERAL, (["string"], [["string"]])]),
    ),
    "mean_iou": Metric(
        ("mean_iou", "mean_accuracy", "overall_accuracy"), evaluate=Interface(pixels.mean_iou, [("map", "map")])
    ),
    "map": Metric(("map", "map_50", "map_75", "mar_100")),  # by `boxes`
    "perplexity": Metric(("perplexity",), lower_is_better=True),
    **{name: Metric((name,)) for name in REWARDS},
    **{name: Metric((name,), lower_is_better=True) for name in ("completions/clipped_ratio", "kl")},
}
REPORTS: dict[str, tuple[str, ...]] = {name: metric.reports for name, metric in METRICS.items() if metric.reports}
"""The numbers of every metric that a recipe may name."""
LOWER_IS_BETTER = tuple(number for metric in METRICS.values() if metric.lower_is_better for number in metric.reports)


def of_kind(kind: Rows) -> tuple[str, ...]:
    """Return the metrics for tasks of one label, one value or a set of labels a row, or of tagged words."""
    return tuple(name for name, metric in METRICS.items() if kind in metric.of)


def computed() -> list[str]:
    """Return the recipes' metrics that are computed from lists of answers, sorted; tasks compute the others."""
    return sorted(name for name in REPORTS if METRICS[name].compute is not None)
