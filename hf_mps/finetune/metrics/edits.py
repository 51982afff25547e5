"""Word and character error rates: the least number of edits, over all rows, for each word or character of the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy


def distance(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Levenshtein's distance: the least number of insertions, deletions and substitutions from `one` to `other`."""
    if not one or not other:
        return max(len(one), len(other))
    numbers = {item: number for number, item in enumerate(dict.fromkeys([*one, *other]))}
    target = numpy.array([numbers[item] for item in other])
    steps = numpy.arange(len(other) + 1)
    row = steps
    for item in one:
        # Deletion or substitution from the row above; then insertions along the row, as a running minimum.
        kept = numpy.minimum(row[1:] + 1, row[:-1] + (target != numbers[item]))
        reached = numpy.concatenate([[row[0] + 1], kept])
        row = numpy.minimum.accumulate(reached - steps) + steps
    return int(row[-1])


def wer(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The word error rate: edits of words over the words of the references, 0 where nothing is wrong, perhaps above 1.

    Raises ValueError where the references hold no word.
    """
    return _rate([text.split() for text in predictions], [text.split() for text in references], "word")


def cer(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The character error rate: as `wer`, over characters, each run of white space counting as one space.

    Raises ValueError where the references hold no character.
    """
    return _rate(
        [" ".join(text.split()) for text in predictions], [" ".join(text.split()) for text in references], "character"
    )


def _rate(predictions: Sequence[Any], references: Sequence[Any], unit: str) -> float:
    total = sum(map(len, references))
    if total == 0:
        raise ValueError(f"the references hold no {unit}, so there is no rate of errors")
    return sum(distance(*pair) for pair in zip(predictions, references, strict=True)) / total


def info(description: str) -> Any:
    """The evaluate.MetricInfo of a metric over one text a row."""
    import datasets
    import evaluate

    text = datasets.Value("string")
    return evaluate.MetricInfo(
        description=description,
        citation="",
        inputs_description="predictions, references: text of shape (n,).",
        features=datasets.Features({"predictions": text, "references": text}),
    )
