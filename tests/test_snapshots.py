"""Messages as inline snapshots: a rewording is written into the tests in lines that the linter takes."""

from __future__ import annotations

import ast
import tokenize
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.snapshots import masked, text_in_pieces

CODE: Any = SimpleNamespace(create_code=lambda code: code)


PARTS = st.lists(st.sampled_from(["a", "word", "\n", "'", '"', "\\"]), max_size=200)


@given(text=st.text(max_size=400) | PARTS.map(" ".join))
def test_a_text_comes_back_whole_from_pieces_that_fit_a_line(text: str) -> None:
    code = text_in_pieces(text, CODE)
    if code is None:
        assert len(text) <= 100
        return
    assert ast.literal_eval(f"({code})") == text
    tokens = tokenize.generate_tokens(StringIO(code).readline)
    pieces = [ast.literal_eval(token.string) for token in tokens if token.type == tokenize.STRING]
    assert all(len(piece) <= 102 or " " not in piece[1:] for piece in pieces)


def test_what_differs_from_run_to_run_is_replaced_by_its_name() -> None:
    assert masked("in /tmp/a7/b and /tmp/a7: 0.5", folder="/tmp/a7", inner="/tmp/a7/b", score=0.5) == (
        "in <inner> and <folder>: <score>"
    )


def test_a_run_without_the_option_takes_a_snapshot_for_its_value(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.getini("addopts")[-1] == "--inline-snapshot=disable"
