"""What guards and sentinels say while a recipe runs is a line of the runner's own, and no warning on stderr."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from inline_snapshot import snapshot

from hf_mps.core import notices
from hf_mps.finetune.report.step_lines import StepLines
from hf_mps.layer import guards
from hf_mps.layer.guards.sentinels import numbers
from hf_mps.layer.guards.sentinels.stream import STREAM
from tests.finetune.tiny import Command


def test_what_a_sentinel_finds_is_a_line_of_the_run(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbers, "TIMES", 1e-6)  # so that every run is one to speak of
    monkeypatch.setattr(numbers, "HISTORY", 2)
    notices.forget()
    STREAM.forget()
    try:
        ended = finetune("my.yaml")
    finally:
        guards.get("gradient-norm").forget()
        notices.forget()
    assert (ended.code, ended.err) == (0, "")
    notes = [line for line in ended.out.splitlines() if "the gradient norm was" in line]
    assert len(notes) == 1
    assert notes[0].startswith("note  the gradient norm was ")
    assert notes[0].endswith("(sentinel; HF_MPS_SENTINELS=-gradient-norm switches it off)")


def test_a_note_goes_where_the_other_lines_go() -> None:
    out = io.StringIO()
    lines = StepLines(stream=out)
    notices.forget()
    with notices.redirected(lines.note):
        notices.warn_user("2 parameters were made contiguous")
        notices.warn_user("2 parameters were made contiguous")
    assert out.getvalue() == snapshot("note  2 parameters were made contiguous\n")
    notices.forget()
