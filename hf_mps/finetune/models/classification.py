"""A classifier's logits as answers: each row's class, its probability, and the rows of predictions.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_mps.core.errors import UserError

Row = dict[str, Any]


def refuse_smoothing(settings: Mapping[str, Any], problem_type: str | None) -> None:
    """Raise UserError where Trainer's `settings` smooth labels, which it does for one class of several alone."""
    if settings.get("label_smoothing_factor") and problem_type not in (None, "single_label_classification"):
        kind = "numbers" if problem_type == "regression" else "several labels"
        raise UserError(
            f"training.label_smoothing_factor is for one class a row, and these rows have {kind}; leave it out"
        )


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
    return [
        {
            **given,
            **truth,
            "prediction": names[answer],
            "probability": round(float(share[answer]), 4),
            **(by_name(share, names) if every else {}),
        }
        for given, truth, answer, share in zip(inputs, known, answers, shares, strict=True)
    ]


def by_name(shares: Any, names: Sequence[str]) -> Row:
    """Return the probabilities of all classes, shape (classes,), by their names."""
    return {"probabilities": {name: round(float(share), 4) for name, share in zip(names, shares, strict=True)}}


def confusion(predicted: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, bytes]:
    """Return the picture of a confusion matrix of the rows of predictions.csv."""
    from hf_mps.finetune.report import classes

    return classes.confusion([(row["label"], row["prediction"]) for row in predicted], names)
