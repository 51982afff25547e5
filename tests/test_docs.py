"""docs/commands.md, first-hour.md, older-scripts.md and recipes.md are what the code says."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import sklearn  # noqa: F401  sets an environment variable when it is first imported, here and not in a test
import torch  # noqa: F401  brings the layer, which has the names

from hf_mps.cli.main import app
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "docs.py"


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script as a module; what it writes goes to a folder of the test's own."""
    spec = importlib.util.spec_from_file_location("docs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.REAL = module.DOCS  # type: ignore[attr-defined]
    monkeypatch.setattr(module, "DOCS", tmp_path / "docs")
    return module


def test_the_pages_are_what_the_code_says(docs: ModuleType) -> None:
    for name, text in docs.pages().items():
        written = (docs.REAL / name).read_text(encoding="utf-8")
        assert written == text, f"docs/{name} is stale; next: python scripts/docs.py"


def test_a_stale_page_fails_the_check_and_names_the_command(
    docs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert docs.main(["--check"]) == 1
    pages = "docs/commands.md, docs/first-hour.md, docs/older-scripts.md, docs/recipes.md"
    line = f"{pages}: not what the code says; next: python scripts/docs.py\n"
    assert capsys.readouterr().err == line
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    with (docs.DOCS / "recipes.md").open("a", encoding="utf-8") as page:
        page.write("mine\n")
    assert docs.main(["--check"]) == 1
    assert capsys.readouterr().err.startswith("docs/recipes.md: not what")


def test_every_verb_recipe_and_task_is_in_them(docs: ModuleType) -> None:
    import typer.main

    pages = docs.pages()
    for verb in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert f"## hf-mps {verb}" in pages["commands.md"]
    for entry in catalogue.entries():
        assert f"\n## {entry.name}\n" in pages["recipes.md"]
        assert entry.purpose in pages["recipes.md"]
    for task in tasks.names():
        assert f"\n## Keys of {task}\n" in pages["recipes.md"]


def test_what_older_scripts_say_is_listed_from_the_tables_of_the_shims(docs: ModuleType) -> None:
    from hf_mps.compat import name_table, removed_arguments

    page = docs.pages()["older-scripts.md"]
    for name in (*removed_arguments.REMOVED, *(old.name for old in name_table.NAMES), *name_table.MODULES):
        assert f"`{name}`" in page
    for release, names in docs.older_page.RELEASES.items():
        assert f"| {release} |" in page
        for name in names:
            module, _, last = name.rpartition(".")
            if module.startswith(("transformers", "huggingface_hub", "datasets")):
                assert getattr(importlib.import_module(module), last) is not None, name
