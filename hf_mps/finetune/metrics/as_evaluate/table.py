"""The one table of metrics that have `evaluate`'s interface. Importing it imports none of their libraries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_mps.finetune.metrics.as_evaluate import answers, labels, pixels, tagged, texts
from hf_mps.finetune.metrics.needs import JIWER, ROUGE, SACREBLEU, Needs

GLUE = ("sst2", "mnli", "mnli_mismatched", "mnli_matched", "cola", "stsb", "mrpc", "qqp", "qnli", "rte", "wnli", "hans")


Columns = Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class Entry:
    """A metric: `compute(predictions, references, **keywords)`, and the types of its columns.

    `columns` are the forms that a row may have, each for predictions and references: a name of `module.TYPES`, in a
    list where there are several of it. `configs` names other columns by configuration, `only` the configurations
    without which there is no metric. `by_config` hands the configuration to `compute`, `numpy` hands it arrays.
    """

    compute: Callable[..., Any]
    columns: Columns
    configs: Mapping[str, Columns] | None = None
    only: tuple[str, ...] = ()
    by_config: bool = False
    numpy: bool = False
    needs: Needs | None = None


_LABELS = [("int32", "int32")]
_MULTILABEL = {"multilabel": [(["int32"], ["int32"])]}
_VALUES = [("float32", "float32")]
_LISTS = {"multilist": [(["float32"], ["float32"])]}
_TEXTS = [("string", "string")]
# A row's references in a list, or its only one as it is.
_SEVERAL = [("string", ["string"]), ("string", "string")]

METRICS: dict[str, Entry] = {
    "accuracy": Entry(labels.accuracy, _LABELS, _MULTILABEL),
    "f1": Entry(labels.f1, _LABELS, _MULTILABEL),
    "precision": Entry(labels.precision, _LABELS, _MULTILABEL),
    "recall": Entry(labels.recall, _LABELS, _MULTILABEL),
    "matthews_correlation": Entry(labels.matthews_correlation, _LABELS, _MULTILABEL),
    "pearsonr": Entry(labels.pearsonr, _VALUES),
    "spearmanr": Entry(labels.spearmanr, _VALUES),
    "mse": Entry(labels.mse, _VALUES, _LISTS),
    "mae": Entry(labels.mae, _VALUES, _LISTS),
    "glue": Entry(labels.glue, [("int64", "int64")], {"stsb": _VALUES}, only=GLUE, by_config=True, numpy=True),
    "xnli": Entry(labels.plain_accuracy, [("int64", "int64")], {"sts-b": _VALUES}, numpy=True),
    "squad": Entry(answers.squad, [("answer", "truths")]),
    "squad_v2": Entry(answers.squad_v2, [("answer or none", "truths")]),
    "seqeval": Entry(tagged.seqeval, [(["string"], ["string"])]),
    "rouge": Entry(texts.rouge, _SEVERAL, needs=ROUGE),
    "sacrebleu": Entry(texts.sacrebleu, _SEVERAL, needs=SACREBLEU),
    "chrf": Entry(texts.chrf, _SEVERAL, needs=SACREBLEU),
    # The last form is that of datasets 1 and 2: tokens, not texts.
    "bleu": Entry(texts.bleu, [*_SEVERAL, (["string"], [["string"]])], needs=SACREBLEU),
    "wer": Entry(texts.wer, _TEXTS, needs=JIWER),
    "cer": Entry(texts.cer, _TEXTS, needs=JIWER),
    "mean_iou": Entry(pixels.mean_iou, [("map", "map")]),
}
