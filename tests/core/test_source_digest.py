"""The digest of the code behind a function: another one for other code, the same one for the same in every process."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_mps.core import source_digest

FILES = {
    "__init__.py": "",
    "task.py": """
from lab import helpers


def encode(batch):
    return helpers.first(batch)


def other(batch):
    return batch
""",
    "helpers.py": "def first(text):\n    return text[0]\n",
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of its own that may be rewritten."""
    folder = tmp_path / "lab"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield folder
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def found(name: str = "encode") -> str:
    """The digest as a new process would have it."""
    forget()
    return source_digest.digest(getattr(importlib.import_module("lab.task"), name))


def test_a_changed_helper_changes_the_digest_and_each_function_has_its_own(lab: Path) -> None:
    before = found()
    assert before == found() != found("other")
    assert source_digest.digest(functools.partial(sys.modules["lab.task"].other, 1)) == found("other")
    (lab / "helpers.py").write_text("def first(text):\n    return text[1]\n", encoding="utf-8")
    assert found() != before


def test_the_digest_is_of_the_code_and_not_of_the_place_or_the_process(lab: Path, run_python) -> None:
    elsewhere = lab.parent / "elsewhere"
    (elsewhere / "lab").mkdir(parents=True)
    for path in lab.glob("*.py"):
        (elsewhere / "lab" / path.name).write_bytes(path.read_bytes())
    code = "from hf_mps.core import source_digest; from lab import task; print(source_digest.digest(task.encode))"
    place = f"import sys; sys.path.insert(0, {str(elsewhere)!r})"
    assert run_python("-c", f"{place}; {code}", env={"PYTHONHASHSEED": "7"}).stdout == found() + "\n"
