"""`from datasets import load_metric` above `import torch`, in an environment into which the wheel was installed."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.assertion.rewrite import AssertionRewriter
from inline_snapshot import snapshot

from tests import CHECKOUT

pytestmark = pytest.mark.process

SCRIPT = """
from datasets import load_metric
import sys
print("torch" in sys.modules, [each for each in sys.meta_path if type(each).__name__ == "HfMpsEarly"])
print(load_metric.__module__)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site-packages of a fresh environment that holds what the wheel puts there, beside this one's libraries."""
    home = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    packages = home / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    beside = {"early.pth": "hf_mps_early.pth", "_hf_mps_early.py": "_hf_mps_early.py"}
    shutil.copytree(CHECKOUT / "hf_mps", packages / "hf_mps", ignore=shutil.ignore_patterns("__pycache__", *beside))
    for name, placed in beside.items():
        shutil.copy(CHECKOUT / "hf_mps" / "layer" / name, packages / placed)
    ours = {sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))}
    (packages / "libraries.pth").write_text("\n".join(sorted(ours)))
    return packages


@pytest.fixture
def stand_in(environment: Path) -> Iterator[Path]:
    """As much of the library datasets as is asked for here: the real one takes seconds."""
    package = environment / "datasets"
    package.mkdir()
    (package / "__init__.py").write_text("def load_dataset(): ...\n")
    yield package
    shutil.rmtree(package)


def python(environment: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_MPS", "PYTHON"))}
    return subprocess.run(
        [environment.parents[2] / "bin" / "python", *arguments],
        cwd=environment.parents[2],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_plain_script_finds_load_metric_before_torch_and_torch_stays_out(environment: Path) -> None:
    done = python(environment, "-c", SCRIPT)
    assert (done.stdout, done.stderr) == ("False []\nhf_mps.layer.compat.metrics\n", "")


@pytest.mark.usefixtures("stand_in")
def test_torch_adds_the_rest_of_the_layer_to_what_waits(environment: Path) -> None:
    script = (
        "import datasets, sys\nfrom hf_mps.core.import_hooks import _Finder\n"
        "waiting = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]\nprint({*waiting[0].table})\n"
        "import torch\nfrom hf_mps.layer.activation.activate import is_on\n"
        "print(is_on(), 'transformers' in waiting[0].table)\n"
    )
    done = python(environment, "-c", script)
    assert done.stdout == "{'datasets'}\nTrue True\n", done.stderr


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("variables", [{"HF_MPS": "0"}, {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, {"HF_MPS": "maybe"}])
def test_where_the_layer_is_off_the_name_is_missing_as_in_stock(environment: Path, variables: dict[str, str]) -> None:
    assert python(environment, "-c", "from datasets import load_metric").returncode == 0
    done = python(environment, "-c", "from datasets import load_metric", **variables)
    assert done.returncode == 1
    assert "ImportError: cannot import name 'load_metric' from 'datasets'" in done.stderr.splitlines()[-1]


def test_a_start_of_python_imports_nothing_and_says_nothing(environment: Path) -> None:
    look = "import sys; print([name for name in sys.modules if name.startswith('hf_mps')], len(sys.meta_path))"
    waiting, off = python(environment, "-c", look), python(environment, "-c", look, HF_MPS="0")
    assert (waiting.stderr, off.stderr) == ("", "")
    # Its finder is there once, although `site` reads the file twice in a virtual environment.
    finders = int(off.stdout.split()[1])
    assert waiting.stdout == f"[] {finders + 1}\n"


def test_what_python_runs_at_every_start_is_an_import_of_one_short_readable_file() -> None:
    lines = (CHECKOUT / "hf_mps" / "layer" / "early.pth").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["import _hf_mps_early"]
    source = (CHECKOUT / "hf_mps" / "layer" / "_hf_mps_early.py").read_text()
    assert source.count("\n") < 40
    assert AssertionRewriter.is_rewrite_disabled(ast.get_docstring(ast.parse(source)) or "")  # else pytest warns
    called = {ast.unparse(node.func) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)}
    assert called == {"find", "os.environ.get", "sys.meta_path.insert", "HfMpsEarly"}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("body", [None, "raise RuntimeError('broken')", "def find(finder, name):\n    1 / 0\n"])
def test_removed_or_broken_it_is_as_if_it_were_not_there(environment: Path, body: str | None) -> None:
    module = environment / "hf_mps" / "layer" / "early.py"
    kept = module.read_text()
    try:
        module.unlink() if body is None else module.write_text(body)
        done = python(environment, "-B", "-c", "import datasets; print(hasattr(datasets, 'load_metric'))")
    finally:
        module.write_text(kept)
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\n", "")


def test_a_library_that_is_not_installed_is_still_missing(environment: Path) -> None:
    done = python(environment, "-I", "-c", "import sys; del sys.path[-2:]; import datasets")
    assert done.stderr.splitlines()[-1] == snapshot("ModuleNotFoundError: No module named 'datasets'")
