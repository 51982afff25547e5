"""A classifier's logits as sets of labels: each label for itself, by its sigmoid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.finetune.data.label_sets import LabelSets
from hf_mps.finetune.models import classification

THRESHOLD = 0.5
SNIPPET = """from transformers import pipeline

classify = pipeline("text-classification", model=".", top_k=None)
print([one for one in classify("a text")[0] if one["score"] >= {threshold:g}])"""


def threshold(asked: float | None, chosen: Mapping[str, Any] | None = None) -> Choice[float]:
    """Return the probability from which on a label is answered; `chosen` holds what the run of a saved model chose."""
    if asked is not None:
        return Choice(asked, "threshold in the recipe")
    if isinstance(said := (chosen or {}).get("threshold"), float):
        return Choice(said, "that of its run")
    return Choice(THRESHOLD, "a label is answered that is likelier than not; threshold=NUMBER moves it")


def probabilities(logits: Any) -> Any:
    """Return the sigmoid in float64, of logits of any shape."""
    from scipy.special import expit

    return expit(logits.astype("float64"))


def answers(logits: Any, least: float) -> Any:
    """Return whether each label's probability is at least `least`, of the shape (rows, labels) of the logits."""
    return probabilities(logits) >= least


def rows(
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
    lines = []
    named = [
        [name for name, flag in zip(found.names, truth, strict=True) if flag]
        for truth in (() if truths is None else truths)
    ]
    known = [{"label": names} for names in named] or [{}] * len(inputs)
    for given, truth, shares in zip(inputs, known, probabilities(logits), strict=True):
        chosen = [place for place in (-shares).argsort(kind="stable") if shares[place] >= least]
        lines.append(
            {
                **given,
                **truth,
                "prediction": [found.names[place] for place in chosen],
                "probability": [round(float(shares[place]), 4) for place in chosen],
                **(classification.by_name(shares, found.names) if every else {}),
            }
        )
    return lines
