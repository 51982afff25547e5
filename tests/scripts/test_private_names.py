"""The table of other libraries' private names: it lists what hf_mps uses, and the installed releases have each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from scripts.tools import private_names
from tests import CHECKOUT

SCRIPT = CHECKOUT / "scripts" / "tools" / "private_names.py"


def test_every_private_name_that_hf_mps_uses_is_in_the_table() -> None:
    assert private_names.unlisted() == []


def test_every_row_is_of_a_library_with_releases_and_somebody_uses_it() -> None:
    assert {row.library for row in private_names.table()} == set(private_names.tried())
    assert [row.name for row in private_names.table() if not private_names.users(private_names.used(), row)] == []
    assert all(row.breaks for row in private_names.table())


@pytest.mark.parametrize("library", ["torch", "transformers", "accelerate", "trl", "datasets", "lightning"])
def test_the_installed_release_has_every_name(library: str) -> None:
    release = private_names.installed(library)
    if release is None:
        pytest.skip(f"{library} is not installed")
    assert private_names.gone(release, private_names.table()) == []


def test_a_name_that_a_release_lost_is_found(tmp_path: Path) -> None:
    file = tmp_path / "accelerate" / "state.py"
    file.parent.mkdir()
    file.write_text("class PartialState:\n    _shared_state = {}\n\n    def prepare_backend(self): ...\n")
    release = private_names.Release("accelerate", "2.0.0", {"accelerate/state.py": file})
    gone = {row.name for row in private_names.gone(release, private_names.table())}
    assert "_prepare_backend" in gone
    assert "_shared_state" not in gone


def test_a_new_use_is_seen_however_it_is_written() -> None:
    source = """
from transformers.trainer import _one
trainer._two
getattr(trainer, "_three", None)
patches = {"transformers.trainer:Trainer._four": "_ours", f"{MODULE}:_five": "_ours_too"}
"""
    names = {name for name, _ in private_names.mentioned(ast.parse(source)) if private_names.is_private(name)}
    assert names == {"_one", "_two", "_three", "_four", "_five"}
