"""The built-in rewards: a number for each completion, from its text and the reference answer of its row.

They have the signature of TRL's reward functions: every argument is a list with an entry for each completion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from hf_mps.metrics import squad

Completion = str | Sequence[Mapping[str, Any]]

# A number as people write it: with a sign, thousands' commas and a fraction.
_NUMBER = re.compile(r"(?:(?<!\w)-)?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")
_MINUS = "\N{MINUS SIGN}"
# Where an answer stands: behind GSM8K's four hashes (openai/grade-school-math, dataset.py), or in LaTeX's box.
_MARKS = (re.compile(r"####\s*(?P<answer>[^\n]*)"), re.compile(r"\\boxed\{(?P<answer>[^{}]*)\}"))


def exact(completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 where a completion is the answer, white space around both aside, otherwise 0.0."""
    pairs = zip(completions, answer, strict=True)
    return [float(words(said).strip() == right.strip()) for said, right in pairs]


def normalised(completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 where a completion is the answer but for case, punctuation, articles and white space, else 0.0."""
    return [squad.exact_match(words(said), [right]) for said, right in zip(completions, answer, strict=True)]


def number(completions: Sequence[Completion], answer: Sequence[str], **_: Any) -> list[float]:
    """Return 1.0 where a completion ends with the answer's number, as `final_number` reads both, otherwise 0.0."""
    pairs = [(final_number(words(said)), final_number(right)) for said, right in zip(completions, answer, strict=True)]
    return [float(said is not None and said == right) for said, right in pairs]


def length(completion_ids: Sequence[Sequence[int]], most: int, **_: Any) -> list[float]:
    """Return 1.0 for a completion of at most `most` tokens, and evenly less for longer ones: 0.0 from twice as many."""
    return [max(0.0, min(1.0, 2.0 - len(ids) / most)) for ids in completion_ids]


def matches(completions: Sequence[Completion], pattern: str, **_: Any) -> list[float]:
    """Return 1.0 where the regular expression `pattern` is found in a completion, otherwise 0.0; a dot is any letter.

    `^` and `$` stand for the completion's beginning and end.
    """
    found = re.compile(pattern, re.DOTALL)
    return [float(found.search(words(said)) is not None) for said in completions]


BUILT_IN: Mapping[str, Callable[..., list[float]]] = {
    "exact": exact,
    "normalised": normalised,
    "number": number,
    "length": length,
    "format": matches,
}
"""By the name that a recipe has."""
WITH_ANSWER = ("exact", "normalised", "number")
"""Those that compare with the row's reference answer."""
OPTIONS = {"length": "most", "format": "pattern"}
"""What else a reward is told, by the name of both."""


def words(completion: Completion) -> str:
    """Return a completion's text; TRL hands on what answers a conversation as a list with one message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def final_number(text: str) -> Decimal | None:
    """Return the number that a text ends with, None where it holds none.

    Where an answer is marked (`#### 72`, `\\boxed{72}`) that is the last number of the last mark; otherwise the text's
    last one. 1,000 is 1000, and 72.0 is 72.
    """
    marked = [match for mark in _MARKS for match in mark.finditer(text)]
    if marked:
        text = max(marked, key=lambda match: match.start())["answer"]
    found: list[str] = _NUMBER.findall(text.replace(_MINUS, "-"))
    return Decimal(found[-1].replace(",", "")) if found else None
