"""What a person gets who installs the wheel into an empty environment and has no checkout."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path, PurePath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import CHECKOUT
from tests.sources import Source, sources
from tests.test_conventions import made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, CHECKOUT],
        check=True,
        capture_output=True,
        text=True,
    )
    (built,) = folder.glob("hf_mps-*.whl")
    return built


def test_the_wheel_carries_every_recipe_and_the_simulator_source(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = {f"hf_mps/{path.relative_to(CHECKOUT)}" for path in (CHECKOUT / "recipes").rglob("*.*")}
    sources = {
        str(path.relative_to(CHECKOUT))
        for path in (CHECKOUT / "hf_mps/metal/simulator/native").iterdir()
        if path.suffix in (".cpp", ".h")
    }
    assert {"hf_mps/recipes/quickstart.yaml", "hf_mps/recipes/glue/mrpc.yaml"} <= recipes
    assert "hf_mps/recipes/data/paraphrases.tsv" in recipes
    assert recipes | sources | {"hf_mps/py.typed"} <= names
    assert not [name for name in names if name.startswith(("tests/", "scripts/"))]
    assert [name for name in names if name.endswith(".pth")] == ["hf_mps_early.pth"]
    # Tools of those who write launch rules stay in the repository; the table that they write is in the wheel.
    assert not [name for name in names if "conformance" in name or "macho" in name or "launch_class_reader" in name]
    assert "hf_mps/metal/operators/launch_classes.json" in names
    # What is not in the package's own folder could be anybody's name.
    assert {name for name in names if "/" not in name} == {"hf_mps_early.pth", "_hf_mps_early.py"}


def test_a_wheel_is_built_in_an_environment_of_its_own_without_torch(tmp_path: Path) -> None:
    constraints = "constraints-darwin.txt" if sys.platform == "darwin" else "constraints.txt"
    said = made("wheel", tmp_path)
    (installs,) = [line for line in said if "pip install" in line]
    assert installs.startswith(".venv-build/bin/python ")
    assert installs.endswith(f" --constraint {constraints} build hatchling")
    assert said[-1] == ".venv-build/bin/python -m build --wheel --no-isolation --outdir dist ."


def _alone(environment: Path, wheel: Path) -> Path:
    """Make an environment with the wheel and what it requires, directly or not, and nothing else; return its Python.

    The packages are links to those of this environment: pip would write a gigabyte. pip says whether any is missing.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (packages,) = environment.glob("lib/*/site-packages")
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-compile", wheel], check=True)
    for name in _required("hf-mps"):
        found = metadata.distribution(name)
        for part in {PurePath(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(found.locate_file(part))
    checked = subprocess.run([*pip, "check"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout
    return python


def _required(name: str, extra: str = "", seen: set[tuple[str, str]] | None = None) -> set[str]:
    """Return the distributions that one requires in this Python, without its own."""
    seen = set() if seen is None else seen
    found: set[str] = set()
    for line in metadata.requires(name) or ():
        one = Requirement(line)
        if one.marker is not None and not one.marker.evaluate({"extra": extra}):
            continue
        found.add(one.name)
        for wanted in {"", *one.extras} - {each for which, each in seen if which == one.name}:
            seen.add((one.name, wanted))
            found |= _required(one.name, wanted, seen)
    return found


# Modules that whoever needs an extra's library imports within a function.
OF_AN_EXTRA = ("hf_mps.finetune.models.", "hf_mps.metal.kernels.lowering.", "hf_mps.metal.pytest_plugin")


def test_what_only_an_extra_brings_is_needed_by_no_module_that_all_import() -> None:
    everywhere = {canonicalize_name(name) for name in (*_required("hf-mps"), "hf-mps")}
    brought = {
        module
        for module, owners in metadata.packages_distributions().items()
        if everywhere.isdisjoint(map(canonicalize_name, owners))
    }
    imported = {name: set(_imported(source)) for name, source in sources().items()}
    needs = {name for name, heads in imported.items() if brought & {head.partition(".")[0] for head in heads}}
    assert {name for name in needs if not name.startswith(OF_AN_EXTRA)} == set()
    importers = {name for name, heads in imported.items() if not heads.isdisjoint(needs)}
    assert {name for name in importers - needs if not name.startswith(OF_AN_EXTRA[1:])} == set()


def _imported(source: Source) -> Iterator[str]:
    """Yield the modules that one imports when it is imported itself, and what may be a module of theirs."""
    for node in source.at_head:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif node.module:
            yield from (node.module, *(f"{node.module}.{name.name}" for name in node.names))


@pytest.mark.nightly
@pytest.mark.slow
def test_installed_in_an_empty_environment_the_quickstart_runs_from_outside_the_checkout(
    wheel: Path, tmp_path: Path
) -> None:
    python = _alone(tmp_path / "environment", wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Two steps: that it learns is the quickstart's own test.
    shortened = ["training.max_steps=2", "data.rows.validation=32", "expect={}"]
    run = subprocess.run(
        [python, "-m", "hf_mps.finetune", "quickstart", *shortened],
        cwd=elsewhere,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    results = json.loads(next(elsewhere.glob("runs/*/results.json")).read_text())
    assert results["device"]["value"] == "mps"
    assert not list(elsewhere.glob("hf_mps"))
    early = [python, "-c", "from datasets import load_metric; import sys; assert 'torch' not in sys.modules"]
    assert subprocess.run(early, cwd=elsewhere, env=variables, check=False).returncode == 0
