"""A classifier's logits as answers: each row's class or labels, their probabilities, the rows of predictions.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_mps.core.choice import Choice

Row = dict[str, Any]
# The least probability of a label, of rows that may have several.
THRESHOLD = 0.5


def logits_of(predictions: Any) -> Any:
    """Return the logits alone; some models return hidden states behind them."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


def keep_logits(logits: Any, _labels: Any) -> Any:
    """Trainer's `preprocess_logits_for_metrics`: drops hidden states behind the logits, which would fill memory."""
    return logits_of(logits)


def probabilities(logits: Any) -> Any:
    """Return the softmax over the last dimension in float64, of logits of any shape."""
    import numpy
    from scipy.special import softmax

    return softmax(numpy.asarray(logits, dtype=numpy.float64), axis=-1)


def sigmoids(logits: Any) -> Any:
    """Return the sigmoid in float64, of logits of any shape."""
    from scipy.special import expit

    return expit(logits.astype("float64"))


def rows(
    each: Sequence[Row], truths: Any, logits: Any, names: Sequence[str], least: float | None = None, every: bool = False
) -> list[Row]:
    """Return the rows of predictions.csv: each row's inputs, its true class, the predicted one and its probability.

    `logits` has shape (rows, classes), `truths` holds class ids, None for rows without. With `least` a row may have
    several labels: `truths` are 0 and 1 of the shape of `logits`, and a row's predictions are the labels of a
    probability of `least` or more, by falling probability. With `every` the probabilities of all classes come by their
    names.
    """
    lines, table = [], probabilities(logits) if least is None else sigmoids(logits)
    for place, (given, shares) in enumerate(zip(each, table, strict=True)):
        line = dict(given)
        if truths is not None and least is None:
            line["label"] = names[truths[place]]
        elif truths is not None:
            line["label"] = [name for name, flag in zip(names, truths[place], strict=True) if flag]
        if least is None:
            best = int(shares.argmax())
            line |= {"prediction": names[best], "probability": round(float(shares[best]), 4)}
        else:
            chosen = [number for number in (-shares).argsort(kind="stable") if shares[number] >= least]
            line["prediction"] = [names[number] for number in chosen]
            line["probability"] = [round(float(shares[number]), 4) for number in chosen]
        lines.append(line | (by_name(shares, names) if every else {}))
    return lines


def by_name(shares: Any, names: Sequence[str]) -> Row:
    """Return the probabilities of all classes, shape (classes,), by their names."""
    return {"probabilities": {name: round(float(share), 4) for name, share in zip(names, shares, strict=True)}}


def confusion(predicted: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Mapping[str, bytes]:
    """Return the picture of a confusion matrix of the rows of predictions.csv."""
    from hf_mps.finetune.report import pictures

    return pictures.confusion([(row["label"], row["prediction"]) for row in predicted], names)


def threshold(asked: float | None, chosen: Mapping[str, Any] | None = None) -> Choice[float]:
    """Return the probability from which on a label is answered; `chosen` holds what the run of a saved model chose."""
    if asked is not None:
        return Choice(asked, "threshold in the recipe")
    if isinstance(said := (chosen or {}).get("threshold"), float):
        return Choice(said, "that of its run")
    return Choice(THRESHOLD, "a label is answered that is likelier than not; threshold=NUMBER moves it")
