"""A command says within a second what it is doing, and leaves nothing of that behind."""

from __future__ import annotations

import io
import sys

import pytest

from hf_mps.core import status


class Screen(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """stderr as a terminal of 80 columns; not a fixture, because pytest puts its own stderr in place after those."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    made = Screen()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_a_terminal_shows_what_goes_on_and_then_what_came_next(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with status.shown("loading …"):
        assert "loading …" in screen.getvalue()
        status.now("tracing …")
    assert "tracing …" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[1A\x1b[2K")  # the line is taken away, and the cursor stands where it stood


def test_nothing_is_drawn_once_the_commands_own_output_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with status.shown("loading …"):
        status.over()
        drawn = screen.getvalue()
    assert screen.getvalue() == drawn


def test_a_log_file_gets_one_plain_line_and_stderr_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with status.shown("loading …", log="glue/mrpc: loading …"):
        status.now("tracing …")
    assert capsys.readouterr() == ("glue/mrpc: loading …\n", "")
    with status.shown("loading …"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_failure_takes_the_line_away_too(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), status.shown("loading …"):
        raise KeyboardInterrupt
    with status.shown("again …"):  # nothing of the first is left that would hide a second
        assert "again …" in screen.getvalue()
