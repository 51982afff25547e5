"""The pytest plugin, in somebody else's suite: a folder with a test file and nothing of ours."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_mps

PACKAGE = Path(hf_mps.__file__).parent
Run = Callable[..., "subprocess.CompletedProcess[str]"]

SUITE = """
import pytest
import torch


def test_device(metal_device):
    assert (torch.ones(2, device=metal_device) + 1).sum().item() == 4


@pytest.mark.metal
def test_marked():
    assert torch.backends.mps.is_available()


def test_falls(fallback_ledger):
    torch.mode(torch.ones(4, 4, device="mps"))


def test_allowed(fallback_ledger):
    fallback_ledger.allow("aten::mode")
    torch.mode(torch.ones(4, 4, device="mps"))
    assert [each.operator for each in fallback_ledger.report().operators] == ["aten::mode"]


def test_native(fallback_ledger, metal_device):
    torch.ones(4, 4, device=metal_device).softmax(-1)


def test_counts(metal_work, metal_device):
    x = torch.ones(2, device=metal_device)
    with metal_work:
        (x + 1).mul_(2)
    assert (metal_work.launches, metal_work.waits) == (2, 0)
    metal_work.at_most(launches=2, waits=0, copies_in=0)


def test_waits(metal_work):
    x = torch.ones(2, device="mps")
    with metal_work:
        (x + 1).sum().item()
    metal_work.at_most(launches=1, waits=0)


def test_plain():
    pass
"""
OPTIONS = ("-m", "pytest", "-rA", "-p", "no:cacheprovider", "-W", "ignore")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "test_theirs.py").write_text(SUITE, encoding="utf-8")
    return tmp_path


def test_a_suite_runs_on_the_simulated_device(suite: Path, run_python: Run) -> None:
    ended = run_python(*OPTIONS, "--simulated-metal=m1-8gb", cwd=suite, env={"HF_MPS_SIMULATE": None})
    assert (
        "simulated Metal device m1-8gb: mps (Metal passed its probe on Apple M1 (simulated), macOS 14.7)"
        in ended.stdout
    )
    for passed in ("test_device", "test_marked", "test_allowed", "test_native", "test_counts", "test_plain"):
        assert f"PASSED test_theirs.py::{passed}\n" in ended.stdout
    assert "FAILED test_theirs.py::test_falls" in ended.stdout
    assert "ran on the CPU, having no Metal kernel: aten::mode (calls: 1)" in ended.stdout
    failure = ended.stdout[ended.stdout.index("launches: 2, and 1 allowed") :]
    assert "1  aten::add.Tensor\n" in failure
    assert "waits: 1, and 0 allowed\n" in failure
    assert "1  test_theirs.py:40 test_waits: item\n" in failure
    assert ended.returncode == 1


def test_without_the_option_what_needs_metal_is_skipped_with_the_reason(suite: Path, run_python: Run) -> None:
    ended = run_python(*OPTIONS, cwd=suite, env={"HF_MPS_SIMULATE": None, "HF_MPS_DEVICE": "cpu"})
    assert ended.returncode == 0
    assert "1 passed, 7 skipped" in ended.stdout
    assert "needs Metal: HF_MPS_DEVICE=cpu switches Metal off" in ended.stdout


def test_an_unknown_profile_ends_in_one_line(suite: Path, run_python: Run) -> None:
    ended = run_python(*OPTIONS, "--simulated-metal=m1-9gb", cwd=suite, env={"HF_MPS_SIMULATE": None})
    assert ended.returncode == 4
    assert ended.stderr.startswith("ERROR: --simulated-metal=m1-9gb: is no device profile; allowed: 1, m1-8gb, ")
    assert ended.stderr.rstrip().endswith("did you mean 'm1-8gb'?")
    assert "next: " not in ended.stderr


def test_tests_named_behind_the_option_are_told_how(suite: Path, run_python: Run) -> None:
    file = next(suite.glob("test_*.py")).name
    ended = run_python(*OPTIONS, "--simulated-metal", f"{file}::test_a", cwd=suite, env={"HF_MPS_SIMULATE": None})
    assert ended.returncode == 4
    assert f"; next: --simulated-metal=1 {file}::test_a" in ended.stderr


# What the Metal wing needs of others: torch and pytest with their own requirements, psutil and PyYAML.
PACKAGES = (
    *("torch", "torchgen", "functorch", "filelock", "typing_extensions", "sympy", "mpmath", "networkx", "jinja2"),
    *("markupsafe", "fsspec", "numpy", "numpy.libs", "psutil", "yaml"),
    *("pytest", "_pytest", "py", "pluggy", "iniconfig", "packaging", "pygments"),
)
ABSENT = ("transformers", "accelerate", "datasets", "pydantic", "rich", "typer", "hf_mps.layer", "hf_mps.finetune")


@pytest.fixture
def wing(tmp_path: Path) -> str:
    """A Python path with a copy of the Metal wing and what it needs, and with nothing else."""
    site, package = tmp_path / "site", tmp_path / "alone" / "hf_mps"
    site.mkdir()
    for name, folder in ((name, Path(folder)) for name in PACKAGES for folder in sys.path):
        for found in (folder / name, folder / f"{name}.py", *folder.glob(f"{name}-*.dist-info")):
            if found.exists() and not (site / found.name).exists():
                (site / found.name).symlink_to(found)
    for room in ("core", "metal"):
        shutil.copytree(PACKAGE / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(PACKAGE / "__init__.py", package)
    return f"{site}:{package.parent}"


def test_the_metal_wing_alone_runs_a_suite(suite: Path, wing: str, run_python: Run) -> None:
    absent = "".join(f"\n    assert find('{name}') is None" for name in ABSENT)
    alone = f"\n\ndef test_alone():\n    from importlib.util import find_spec as find\n{absent}\n"
    (suite / "test_theirs.py").write_text(SUITE + alone, encoding="utf-8")
    options = (*OPTIONS, "-p", "hf_mps.metal.pytest_plugin", "--simulated-metal=m1-8gb")
    # Without `site`, Python sees no environment but that path.
    ended = run_python("-S", *options, "test_theirs.py", cwd=suite, env={"HF_MPS_SIMULATE": None, "PYTHONPATH": wing})
    assert "mps (Metal passed its probe on Apple M1 (simulated), macOS 14.7)" in ended.stdout, ended.stderr
    for passed in ("device", "marked", "allowed", "native", "counts", "plain", "alone"):
        assert f"PASSED test_theirs.py::test_{passed}\n" in ended.stdout
    assert "ran on the CPU, having no Metal kernel: aten::mode (calls: 1)" in ended.stdout
    assert "2 failed, 7 passed" in ended.stdout
    assert "aten::mode" in ended.stderr, "the table of what fell back, at the end of the process"
