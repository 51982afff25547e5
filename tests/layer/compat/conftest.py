"""Notices are said once in a process: each test here begins as if none had been."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_mps.core import notices


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], list[str]]:
    """The notices since the last call, without `hf-mps: `."""
    monkeypatch.setattr(notices, "_said", set())

    def said() -> list[str]:
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("hf-mps: ") for line in lines if line.startswith("hf-mps: ")]

    return said
