"""The built-in rewards score what they say, of texts and of messages alike."""

from __future__ import annotations

from decimal import Decimal

import pytest

from hf_mps.finetune.rewards import choose

SAID = [{"role": "assistant", "content": "The sum is 1,072."}]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("3 + 4 = 7, so\n#### 72", "72"),
        ("#### 8 apples and later 9\n#### $1,234.50", "1234.50"),
        ("It is \\boxed{-5} of 12", "-5"),
        ("ten of 5-3 is 2.", "2"),
        ("range 5-3", "3"),
        ("minus \N{MINUS SIGN}4", "-4"),
        ("1,000,000", "1000000"),
        ("12,5", "5"),
        ("no number", None),
    ],
)
def test_a_text_ends_with_the_number_that_is_marked_or_its_last(text: str, number: str | None) -> None:
    assert choose.final_number(text) == (None if number is None else Decimal(number))


def test_numbers_are_compared_by_their_value() -> None:
    said = [SAID, "1072.0", "1073", "none", "#### 5"]
    assert choose.number(said, ["#### 1072", "1,072", "1072", "none", "5 of 5"]) == [1, 1, 0, 0, 1]


def test_the_answer_exactly_or_normalised() -> None:
    said, answer = ["The Cat.\n", "a cat", "dog"], ["The Cat.", "The cat!", "cat"]
    assert choose.exact(said, answer) == [1, 0, 0]
    assert choose.normalised(said, answer) == [1, 1, 0]


def test_length_falls_evenly_to_nothing_at_twice_as_much() -> None:
    ids = [[0] * count for count in (1, 4, 5, 6, 8, 20)]
    assert choose.length(ids, most=4) == [1, 1, 0.75, 0.5, 0, 0]


def test_a_pattern_is_searched_over_lines() -> None:
    said = ["<think>a\nb</think>7", "7", SAID]
    assert choose.matches(said, pattern=r"^<think>.*</think>\d$") == [1, 0, 0]
    assert choose.matches(said, pattern=r"\d\.?$") == [1, 1, 1]
