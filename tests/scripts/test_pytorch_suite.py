"""scripts/tools/pytorch_suite.py: every line of its lists has a reason, and a wrong path ends in a line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_mps.metal.pytest_plugin import known_failures
from tests import CHECKOUT

TOOLS = CHECKOUT / "scripts" / "tools"
LISTS = sorted((TOOLS / "known_failures_of_pytorch").glob("*.txt"))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_line_of_a_list_has_a_reason(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    import pytorch_suite  # type: ignore[import-not-found]

    entries = known_failures.read(path, str(path))
    assert entries
    for entry in entries:
        assert entry.test.startswith("test_mps.py::Test")
        assert pytorch_suite.reason_of(f"{entry.place}: {entry.exception}").endswith(".")
    monkeypatch.delitem(sys.modules, "pytorch_suite")


def test_a_path_that_is_no_file_ends_in_a_line(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ended = run_python(str(TOOLS / "pytorch_suite.py"), "no.py")
    assert ended.returncode == 2
    assert ended.stderr.endswith("no such file: no.py; next: python scripts/tools/pytorch_suite.py\n")
