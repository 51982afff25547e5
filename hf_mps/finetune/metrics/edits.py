"""Word and character error rates by jiwer: edits over all rows, for each word or character of the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def wer(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The word error rate: edits of words over the words of the references, 0 where nothing is wrong, perhaps above 1.

    Words stand between white space of any kind. Raises ValueError where the references hold no word.
    """
    from jiwer import process_words

    return _rate(process_words, predictions, references, "word")


def cer(predictions: Sequence[str], references: Sequence[str]) -> float:
    """The character error rate: as `wer`, over characters, each run of white space counting as one space.

    Raises ValueError where the references hold no character.
    """
    from jiwer import process_characters

    return _rate(process_characters, predictions, references, "character")


def spaced(text: str) -> str:
    """`text` with one space for each run of white space, and none around it."""
    return " ".join(text.split())


def _rate(count: Any, predictions: Sequence[str], references: Sequence[str], unit: str) -> float:
    answers, truths = (list(map(spaced, texts)) for texts in (predictions, references))
    found = count(truths, answers)
    wrong = found.substitutions + found.deletions
    if found.hits + wrong == 0:
        raise ValueError(f"the references hold no {unit}, so there is no rate of errors")
    return float((wrong + found.insertions) / (found.hits + wrong))
