"""The generated pages are what the code says, and every page names things that exist; `make check` builds the site."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import sklearn  # noqa: F401  sets an environment variable when it is first imported, here and not in a test
import torch  # noqa: F401  brings the layer, which has the names

from hf_mps.cli.main import app
from hf_mps.core import settings
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue
from hf_mps.layer import integrations
from hf_mps.layer.compat import names as gone
from hf_mps.layer.compat import removed_arguments
from hf_mps.layer.guards.catalogue import GUARDS, SENTINELS
from hf_mps.metal.device import faults
from tests import CHECKOUT, scripts

BESIDE = ("CONTRIBUTING.md", "README.md", "SECURITY.md")
PAGES = [*sorted((CHECKOUT / "docs").glob("*.md")), *(CHECKOUT / name for name in BESIDE)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module, which makes its pages once: the code does not change meanwhile."""
    module = scripts.script("docs")
    module.pages = functools.cache(module.pages)  # type: ignore[attr-defined]
    module.REAL = module.DOCS  # type: ignore[attr-defined]
    return module


@pytest.fixture
def docs(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script; what it writes goes to a folder of the test's own."""
    monkeypatch.setattr(script, "DOCS", tmp_path / "docs")
    return script


def test_the_pages_are_what_the_code_says(docs: ModuleType) -> None:
    for name, text in docs.pages().items():
        written = (docs.REAL / name).read_text(encoding="utf-8")
        assert written == text, f"docs/{name} is stale; next: python scripts/tools/docs.py"


def test_a_stale_page_fails_the_check_and_names_the_command(
    docs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert docs.main(["--check"]) == 1
    first = "docs/commands.md, docs/first-hour.md, docs/hazards.md, docs/keys.md, docs/older-scripts.md"
    pages = f"{first}, docs/patches.md, docs/recipes.md, docs/benchmarks.md, docs/img/rooms.svg"
    line = f"{pages}: not what the code says; next: python scripts/tools/docs.py\n"
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
        assert f"</a>{entry.name} |" in pages["recipes.md"]
        assert entry.purpose in pages["recipes.md"]
    for task in tasks.names():
        assert f"\n| `{task}` | " in pages["keys.md"]


def test_every_guard_sentinel_variable_and_fault_is_in_them(docs: ModuleType) -> None:
    pages = docs.pages()
    for name in GUARDS.names:
        assert f'<a id="{name}"></a>`{name}`' in pages["hazards.md"]
    for name in (*SENTINELS.names, *faults.SIMULATED):
        assert f"`{name}`" in pages["hazards.md"]
    for variable in settings.KNOWN:
        assert f"\n| `{variable}` |" in pages["commands.md"]


@pytest.mark.process
def test_every_declared_patch_is_in_them_with_who_declares_it(docs: ModuleType) -> None:
    rows = [line for line in docs.pages()["patches.md"].splitlines() if line.startswith("- ")]
    for patch in integrations.declared():
        target = patch.target.replace("pytorch_lightning.", "lightning.pytorch.")
        place, _, name = target.rpartition("::" if "::" in target else ":")
        assert any(patch.name in row and f"`{place}`:" in row and f"`{name}`" in row for row in rows), patch


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_names_no_folder_of_somebodys_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"(?<![\w.~])/(home|root|work|Users|tmp/bash)\b", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_paths_of_the_project_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(
        re.findall(r"(?<![\w./-])((?:hf_mps|scripts|tests|recipes|docs|\.github)/[\w./-]*\w/?)(?![\w*<{…])", text)
    )
    assert [name for name in sorted(named) if not (CHECKOUT / name).exists()] == []


@pytest.mark.parametrize("name", BESIDE)
def test_the_links_of_a_page_beside_the_sources_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", (CHECKOUT / name).read_text(encoding="utf-8"))
    assert [link for link in links if not (CHECKOUT / link).is_file()] == []


def test_what_older_scripts_say_is_listed_from_the_tables_of_the_shims(docs: ModuleType) -> None:
    page = docs.pages()["older-scripts.md"]
    for name in (*removed_arguments.REMOVED, *(old.name for old in gone.NAMES)):
        assert f"`{name}`" in page
    for release, names in docs.older_page.RELEASES.items():
        assert f"| {release} |" in page
        for name in names:
            module, _, last = name.rpartition(".")
            if module.startswith(("transformers", "huggingface_hub", "datasets")):
                assert getattr(importlib.import_module(module), last) is not None, name
