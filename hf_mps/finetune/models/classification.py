"""A classifier's logits as answers: each row's class or labels, their probabilities, the rows of predictions.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.label_sets import LabelSets

Row = dict[str, Any]
# Of rows that may have several labels: the least probability of one, and how the model is called.
THRESHOLD = 0.5
SETS_SNIPPET = """from transformers import pipeline

classify = pipeline("text-classification", model=".", top_k=None)
print([one for one in classify("a text")[0] if one["score"] >= {threshold:g}])"""


def refuse_smoothing(settings: Mapping[str, Any], problem_type: str | None) -> None:
    """Raise UserError where Trainer's `settings` smooth labels, which it does for one class of several alone."""
    if settings.get("label_smoothing_factor") and problem_type not in (None, "single_label_classification"):
        kind = "numbers" if problem_type == "regression" else "several labels"
        raise UserError(f"training.label_smoothing_factor is for one class a row, and these have {kind}; leave it out")


def logits_of(predictions: Any) -> Any:
    """Return the logits alone; some models return hidden states behind them."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


def keep_logits(logits: Any, _labels: Any) -> Any:
    """Trainer's `preprocess_logits_for_metrics`: drops hidden states behind the logits, which would fill memory."""
    return logits_of(logits)


def probabilities(logits: Any) -> Any:
    """Return the softmax over the last dimension in float64, of logits of any shape."""
    import numpy

    values = numpy.asarray(logits, dtype=numpy.float64)
    powers = numpy.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def rows(
    inputs: Sequence[Mapping[str, Any]],
    truths: Sequence[int] | None,
    logits: Any,
    names: Sequence[str],
    *,
    every: bool = False,
) -> list[Row]:
    """Return each row's inputs, its true class, the predicted class and that class's probability.

    `logits` has shape (rows, classes), `truths` holds class ids, None for rows without. With `every` the probabilities
    of all classes come by their names.
    """
    shares = probabilities(logits)
    answers = shares.argmax(axis=-1)
    known = [{}] * len(answers) if truths is None else [{"label": names[truth]} for truth in truths]
    lines = []
    for given, truth, answer, share in zip(inputs, known, answers, shares, strict=True):
        said = {"prediction": names[answer], "probability": round(float(share[answer]), 4)}
        lines.append({**given, **truth, **said, **(by_name(share, names) if every else {})})
    return lines


def by_name(shares: Any, names: Sequence[str]) -> Row:
    """Return the probabilities of all classes, shape (classes,), by their names."""
    return {"probabilities": {name: round(float(share), 4) for name, share in zip(names, shares, strict=True)}}


def confusion(predicted: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, bytes]:
    """Return the picture of a confusion matrix of the rows of predictions.csv."""
    from hf_mps.finetune.report import classes

    return classes.confusion([(row["label"], row["prediction"]) for row in predicted], names)


def threshold(asked: float | None, chosen: Mapping[str, Any] | None = None) -> Choice[float]:
    """Return the probability from which on a label is answered; `chosen` holds what the run of a saved model chose."""
    if asked is not None:
        return Choice(asked, "threshold in the recipe")
    if isinstance(said := (chosen or {}).get("threshold"), float):
        return Choice(said, "that of its run")
    return Choice(THRESHOLD, "a label is answered that is likelier than not; threshold=NUMBER moves it")


def sigmoids(logits: Any) -> Any:
    """Return the sigmoid in float64, of logits of any shape."""
    from scipy.special import expit

    return expit(logits.astype("float64"))


def set_answers(logits: Any, least: float) -> Any:
    """Return whether each label's probability is at least `least`, of the shape (rows, labels) of the logits."""
    return sigmoids(logits) >= least


def set_rows(
    inputs: Sequence[Mapping[str, Any]],
    truths: Any,
    logits: Any,
    found: LabelSets,
    least: float,
    *,
    every: bool = False,
) -> list[Any]:
    """Return the rows of predictions.csv: each row's inputs, its labels, those answered and their probabilities.

    `truths` (0 and 1; None for rows without) and `logits` have the shape (rows, labels); a row's predictions come by
    falling probability. With `every` the probabilities of all labels come by their names.
    """
    names = found.names
    known: Any = [{}] * len(inputs)
    if truths is not None:
        known = [{"label": [name for name, flag in zip(names, truth, strict=True) if flag]} for truth in truths]
    lines = []
    for given, truth, shares in zip(inputs, known, sigmoids(logits), strict=True):
        chosen = [place for place in (-shares).argsort(kind="stable") if shares[place] >= least]
        said = {
            "prediction": [names[place] for place in chosen],
            "probability": [round(float(shares[place]), 4) for place in chosen],
        }
        lines.append({**given, **truth, **said, **(by_name(shares, names) if every else {})})
    return lines
