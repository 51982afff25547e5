"""Answer spans: the n best of a window are exactly the n best, and the rule for no answer is SQuAD 2.0's."""

from __future__ import annotations

import math

import numpy
import pytest

from hf_mps.finetune.text.windows import NOWHERE, Span, Window, answer, best_spans


def window(draw: numpy.random.Generator, tokens: int, question: int) -> Window:
    """A window of `tokens` tokens of which the first `question` and the last are not of the text, padded by three."""
    starts = numpy.full(tokens, NOWHERE)
    ends = numpy.full(tokens, NOWHERE)
    starts[question:-1] = numpy.arange(tokens - question - 1) * 4
    ends[question:-1] = starts[question:-1] + 3
    logits = draw.normal(size=(2, tokens + 3)).astype("float32") * 3
    return Window(logits[0], logits[1], starts, ends, 0)


def brute_force(one: Window, count: int, longest: int) -> list[Span]:
    """Every span, sorted."""
    inside = [place for place, start in enumerate(one.starts) if start != NOWHERE]
    every = [
        (-(float(one.start_logits[first]) + float(one.end_logits[last])), first, last)
        for first in inside
        for last in inside
        if first <= last < first + longest
    ]
    return [Span(int(one.starts[a]), int(one.ends[b]), -score) for score, a, b in sorted(every)[:count]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("count", "longest"), [(1, 30), (5, 1), (20, 4), (1000, 30)])
def test_the_n_best_spans_are_those_of_a_brute_force_search(seed: int, count: int, longest: int) -> None:
    draw = numpy.random.default_rng(seed)
    one = window(draw, tokens=int(draw.integers(8, 40)), question=int(draw.integers(2, 6)))
    assert best_spans(one, count, longest) == brute_force(one, count, longest)


def test_of_equal_scores_the_earlier_and_then_the_shorter_span_comes_first() -> None:
    starts = numpy.array([NOWHERE, 0, 2, 4])
    one = Window(numpy.zeros(4), numpy.zeros(4), starts, numpy.where(starts == NOWHERE, NOWHERE, starts + 1), 0)
    assert [(span.start, span.end) for span in best_spans(one, 4, 30)] == [(0, 1), (0, 3), (0, 5), (2, 3)]


def test_a_logit_that_is_no_number_makes_no_span() -> None:
    starts = numpy.array([0, 2])
    one = Window(numpy.array([math.nan, 1.0]), numpy.array([1.0, 1.0]), starts, starts + 1, 0)
    assert best_spans(one, 5, 5) == [Span(2, 3, 2.0)]


def pieces(*scored: tuple[int, int, float, float]) -> list[Window]:
    """A window for each (start, end, logit of the span's two ends, logit of no answer)."""
    made = []
    for start, end, span, null in scored:
        starts, ends = numpy.array([NOWHERE, start]), numpy.array([NOWHERE, end])
        made.append(Window(numpy.array([null, span]), numpy.array([null, span]), starts, ends, 0))
    return made


TEXT = "Ada lives in Oslo"


def test_the_answer_is_the_best_of_all_windows() -> None:
    found = answer(TEXT, pieces((0, 3, 1.0, 0.0), (13, 17, 2.0, 0.0)))
    assert (found.text, found.start) == ("Oslo", 13)
    assert found.probability == pytest.approx(1 / (1 + math.exp(-2.0)))


def test_a_span_that_two_windows_share_counts_once_with_its_better_score() -> None:
    found = answer(TEXT, pieces((0, 3, 1.0, 0.0), (0, 3, 3.0, 0.0)))
    assert (found.text, found.probability, found.null_margin) == ("Ada", 1.0, -6.0)


def test_no_answer_wins_where_every_window_says_so_and_the_threshold_is_passed() -> None:
    windows = pieces((0, 3, 1.0, 5.0), (13, 17, 1.5, 2.0))
    # The null score is the least of the windows': 4, one more than the best span's 3.
    told = answer(TEXT, windows, nothing=True)
    assert (told.text, told.start, told.null_margin) == ("", -1, 1.0)
    assert answer(TEXT, windows, nothing=True, threshold=1.0).text == "Oslo"
    assert answer(TEXT, windows).text == "Oslo"
    one = answer(TEXT, pieces((0, 3, 1.0, 5.0), (13, 17, 1.5, 1.0)), nothing=True)
    assert (one.text, one.null_margin) == ("Oslo", -1.0)
    assert one.probability < answer(TEXT, pieces((0, 3, 1.0, 5.0), (13, 17, 1.5, 1.0))).probability


def test_windows_without_a_token_of_the_text_answer_nothing() -> None:
    nowhere = numpy.array([NOWHERE, NOWHERE])
    assert answer("", [Window(numpy.ones(2), numpy.ones(2), nowhere, nowhere, 0)]).text == ""
