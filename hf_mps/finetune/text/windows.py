"""Answers found in the logits of a text's overlapping windows of tokens."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

NOWHERE = -1
"""The character offset of a token that does not belong to the text: the question, special tokens, padding."""


def token_span(starts: Sequence[int], ends: Sequence[int], span: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the first and last token of the characters `span`; None where a window does not hold all of them."""
    if span is None:
        return None
    first = next((number for number, start in enumerate(starts) if start != NOWHERE), len(starts))
    last = next((number for number in reversed(range(len(starts))) if starts[number] != NOWHERE), -1)
    if first > last or starts[first] > span[0] or ends[last] < span[1]:
        return None
    begin = bisect_right(starts, span[0], first, last + 1) - 1
    end = bisect_left(ends, span[1], first, last + 1)
    return (begin, end) if begin <= end else (begin, begin)


@dataclass(frozen=True)
class Window:
    """A piece of a text as the model saw it.

    `start_logits` and `end_logits` have shape (width,); `starts` and `ends` are the characters at which each token
    begins and ends in the whole text (NOWHERE outside of it), shape (tokens,) with tokens at most width. `null` is the
    position of the token that means "no answer here".
    """

    start_logits: Any
    end_logits: Any
    starts: Any
    ends: Any
    null: int


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` (exclusive) of a text; `score` is the sum of its two logits."""

    start: int
    end: int
    score: float


@dataclass(frozen=True)
class Answer:
    """A text's answer: `text` is empty where there is none, and `start` is then -1.

    `probability` is the softmax over the n-best spans (and "no answer" where that is allowed). `null_margin` is the
    score of "no answer" minus that of the best span: above the threshold, the text has no answer.
    """

    text: str
    start: int
    probability: float
    null_margin: float


def best_spans(window: Window, count: int, longest: int) -> list[Span]:
    """Return the `count` best spans of a window, at most `longest` tokens long, best first; every span is scored.

    A span begins and ends in the text. Among equal scores the earlier, then the shorter span comes first.
    """
    starts, ends = numpy.asarray(window.starts), numpy.asarray(window.ends)
    width = len(starts)
    inside = starts != NOWHERE
    first = numpy.where(inside, numpy.asarray(window.start_logits, dtype=numpy.float64)[:width], -numpy.inf)
    last = numpy.where(inside, numpy.asarray(window.end_logits, dtype=numpy.float64)[:width], -numpy.inf)
    # Row `more` holds the spans of `more` further tokens; longest x width sums are all spans.
    sums = numpy.full((min(longest, width), width), -numpy.inf)
    for more in range(len(sums)):
        sums[more, : width - more] = first[: width - more] + last[more:]
    flat = numpy.where(numpy.isnan(sums), -numpy.inf, sums).ravel()
    taken = min(count, flat.size)
    worst = numpy.partition(flat, flat.size - taken)[flat.size - taken]
    # All ties with the worst: which of them a partition keeps is undefined.
    places = numpy.flatnonzero((flat >= worst) & (flat > -numpy.inf)).tolist()
    ranked = sorted((-flat[place], place % width, place // width) for place in places)
    return [Span(int(starts[at]), int(ends[at + more]), float(-score)) for score, at, more in ranked[:count]]


def answer(
    text: str, pieces: Iterable[Window], count: int = 20, longest: int = 30, nothing: bool = False, threshold: float = 0
) -> Answer:
    """Return what `text` answers, from all of its windows, `pieces`: the best of each window's `count` best spans.

    `longest` is in tokens. With `nothing` there may be no answer (SQuAD 2.0): when the null score, the least over the
    windows, exceeds the best span by more than `threshold`. transformers' run_qa.py has the same rule, but combines the
    20 best starts with the 20 best ends; this n-best list is exact.
    """
    seen: dict[tuple[int, int], Span] = {}
    null = math.inf
    for window in pieces:
        null = min(null, float(window.start_logits[window.null]) + float(window.end_logits[window.null]))
        for span in best_spans(window, count, longest):
            place = (span.start, span.end)
            if place not in seen or seen[place].score < span.score:
                seen[place] = span
    ordered = sorted(seen.values(), key=lambda span: (-span.score, span.start, span.end))[:count]
    if not ordered:
        return Answer("", -1, 1.0, math.inf)
    margin = null - ordered[0].score
    scores = numpy.array([span.score for span in ordered] + ([null] if nothing else []))
    powers = numpy.exp(scores - scores.max())
    shares = (powers / powers.sum()).tolist()
    if nothing and margin > threshold:
        return Answer("", -1, shares[-1], margin)
    return Answer(text[ordered[0].start : ordered[0].end], ordered[0].start, shares[0], margin)
