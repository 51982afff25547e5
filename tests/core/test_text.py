"""Times, sizes and errors as people read them."""

from __future__ import annotations

import pytest

from hf_mps.core import text

GIB = 2**30


@pytest.mark.parametrize(
    ("seconds", "clock", "duration"),
    [
        (0, "0:00", "0.0 s"),
        (59.96, "1:00", "1 min 00 s"),
        (192.3, "3:12", "3 min 12 s"),
        (3599.7, "1:00:00", "1 h 00 min"),
    ],
)
def test_seconds_read_as_people_say_them(seconds: float, clock: str, duration: str) -> None:
    assert text.clock(seconds) == clock
    assert text.duration(seconds) == duration


def test_an_eta_that_is_not_known_is_dashes() -> None:
    assert text.clock(float("inf")) == "--:--"


def test_bytes_read_as_mebibytes_below_one_gibibyte() -> None:
    assert [text.memory(size) for size in (0, 512 * 2**20, GIB, 2_085_000_000)] == [
        "0 MiB",
        "512 MiB",
        "1.00 GiB",
        "1.94 GiB",
    ]


def test_an_error_is_its_first_line_or_its_kind() -> None:
    assert text.first_line(ValueError("\n  first\nsecond")) == "first"
    assert text.first_line(ValueError("it says:\nthis\nand that")) == "it says: this"
    assert text.first_line(ValueError()) == text.summary(ValueError("  ")) == "ValueError"
    assert text.summary(KeyError("a")) == "KeyError: 'a'"


def test_a_number_agrees_with_its_noun() -> None:
    assert [text.counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_rows_stand_in_columns_and_one_long_cell_shifts_its_own_line_only() -> None:
    rows = [("a", "1", "x"), ("bcd", "10", ""), ("e" * 41, "2")]
    assert list(text.aligned(rows, right=(1,))) == ["a     1  x", "bcd  10", f"{'e' * 41}   2"]
    assert list(text.aligned([])) == []
