"""The matrix of library versions: where it makes its environments, and what its table says."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot

from scripts.tools import matrix
from tests import CHECKOUT

SCRIPT = CHECKOUT / "scripts" / "tools" / "matrix.py"


def outcome(passed: int, *failed: str) -> Any:
    return matrix.Outcome(("torch 2.13.0", "transformers 5.0.0", "accelerate 1.10.1"), passed, 3, failed, 162.4)


def test_a_folder_in_the_checkout_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = SCRIPT.parent.parent / "venvs"
    monkeypatch.setattr(sys, "argv", ["matrix.py", "--folder", str(folder)])
    with pytest.raises(SystemExit) as caught:
        matrix.main()
    assert caught.value.code == 2
    assert f"--folder {folder} lies in the checkout; next: --folder /tmp/matrix" in capsys.readouterr().err
    assert not folder.exists()


def test_the_table_has_versions_and_counts() -> None:
    rows = [outcome(120), outcome(119, "tests.layer.guards::test_one")]
    assert matrix.table(rows).splitlines() == snapshot(
        [
            "pass  torch 2.13.0            transformers 5.0.0      accelerate 1.10.1       "
            "120 passed, 0 failed, 3 skipped  162 s",
            "FAIL  torch 2.13.0            transformers 5.0.0      accelerate 1.10.1       "
            "119 passed, 1 failed, 3 skipped  162 s",
        ]
    )


def test_a_run_without_a_test_is_no_success() -> None:
    assert [outcome(*each).good for each in ((1,), (0,), (1, "x"))] == [True, False, False]


def test_an_environment_is_made_once_with_the_versions_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed: list[tuple[str, ...]] = []
    monkeypatch.setattr(matrix.venv, "create", lambda home, **_: home.mkdir(parents=True))
    monkeypatch.setattr(matrix, "install", lambda python, *what: installed.append(what))
    versions = {"torch": "2.13.0", "transformers": "5.0", "accelerate": "newest"}
    first = matrix.environment(tmp_path, versions, None)
    assert matrix.environment(tmp_path, versions, None) == first
    assert first.parent.parent.name == "torch2.13.0-transformers5.0-acceleratenewest"
    assert [each[:2] for each in installed] == [("torch==2.13.0",), ("transformers==5.0.*", "accelerate")]
