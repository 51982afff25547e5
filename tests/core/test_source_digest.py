"""The digest of the code behind a function: another one for other code, the same one for the same in every process."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hf_mps.core import source_digest

FILES = {
    "__init__.py": "",
    "task.py": """
from lab import helpers
from lab.kinds import Spelling
from lab.numbers import BASE


def make(spelling=None):
    spelling = spelling or Spelling()

    def encode(batch):
        from lab import late

        return [late.last(helpers.first(spelling.clean(text))) + BASE for text in batch]

    return encode
""",
    "helpers.py": "def first(text):\n    return text[0]\n",
    "kinds.py": """
from lab.deep import strip


class Spelling:
    def clean(self, text):
        return strip(text)
""",
    "deep.py": "def strip(text):\n    return text.strip()\n",
    "late.py": "def last(text):\n    return ord(text)\n",
    "numbers.py": "BASE = 3\nOTHER = 5\n",
    "plots.py": "def draw():\n    return None\n",
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of its own that may be rewritten."""
    folder = tmp_path / "lab"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield folder
    forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]
    importlib.invalidate_caches()


def task() -> ModuleType:
    """The package's task, imported as a new process would."""
    forget()
    return importlib.import_module("lab.task")


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("task.py", "+ BASE", "- BASE"),
        ("helpers.py", "text[0]", "text[1]"),
        ("kinds.py", "return strip(text)", "return strip(text).lower()"),
        ("deep.py", "text.strip()", "text.lstrip()"),
        ("late.py", "ord(text)", "-ord(text)"),
        ("numbers.py", "BASE = 3", "BASE = 4"),
    ],
)
def test_a_change_of_whatever_the_code_uses_changes_the_digest(lab: Path, file: str, before: str, after: str) -> None:
    old = source_digest.digest(task().make())
    text = (lab / file).read_text(encoding="utf-8")
    assert before in text
    (lab / file).write_text(text.replace(before, after), encoding="utf-8")
    assert source_digest.digest(task().make()) != old


def test_a_change_of_what_it_does_not_use_does_not(lab: Path) -> None:
    old = source_digest.digest(task().make())
    (lab / "plots.py").write_text("def draw():\n    return 1\n", encoding="utf-8")
    (lab / "numbers.py").write_text(FILES["numbers.py"].replace("OTHER = 5", "OTHER = 6"), encoding="utf-8")
    assert source_digest.digest(task().make()) == old


def test_the_digest_is_of_the_code_and_not_of_the_place_or_the_process(lab: Path, run_python) -> None:
    code = "from hf_mps.core import source_digest; from lab import task; print(source_digest.digest(task.make()))"
    elsewhere = lab.parent / "elsewhere"
    (elsewhere / "lab").mkdir(parents=True)
    for path in lab.glob("*.py"):
        (elsewhere / "lab" / path.name).write_bytes(path.read_bytes())
    answers = {
        run_python("-c", f"import sys; sys.path.insert(0, {str(place)!r}); {code}", env={"PYTHONHASHSEED": seed}).stdout
        for place, seed in ((lab.parent, "0"), (lab.parent, "1"), (elsewhere, "random"))
    }
    assert answers == {source_digest.digest(task().make()) + "\n"}


def test_a_tasks_features_hang_on_few_files_and_on_no_picture() -> None:
    from hf_mps.finetune.tasks import sft

    code = source_digest._Code("hf_mps")
    code.visit(sft._tokenised)
    assert {"hf_mps.finetune.tasks.sft", "hf_mps.finetune.text.chat"} <= code.modules
    assert not [name for name in code.modules if ".report" in name or ".metrics" in name]
