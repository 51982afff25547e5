"""`pytest --metal-kernels` in somebody else's suite: which kernels ran, for each test and for all."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.metal import kernels, pytest_plugin
from hf_mps.metal.kernels.coverage import Counts

Run = Callable[..., "subprocess.CompletedProcess[str]"]

SUITE = """
import os
import subprocess
import sys

import torch

CHILD = "import torch; from hf_mps.metal import kernels; print(kernels.running().release.version)"


def test_gelu(metal_kernels, metal_device):
    torch.nn.functional.gelu(torch.ones(8, device=metal_device))
    assert metal_kernels.kernels == {"fill_scalar_dense_float": 1, "gelu_dense_scalar_float_float": 1}
    assert metal_kernels.operators == {"fill_.Scalar": 1, "gelu": 1}
    assert (metal_kernels.coverage.ran, metal_kernels.coverage.share) == (2, 1.0)


def test_counts_begin_with_the_test(metal_kernels):
    assert not metal_kernels.kernels


def test_without_a_rule(metal_kernels):
    torch.nn.functional.softmax(torch.ones(2, 8, device="mps"), 0)
    assert metal_kernels.reasons or metal_kernels.coverage.others


def test_child():
    ended = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert ended.stdout == os.environ["HF_MPS_KERNELS"] + "\\n", ended.stderr
"""
OPTIONS = ("-m", "pytest", "-rA", "-p", "no:cacheprovider", "-W", "ignore")
PLAIN = {"HF_MPS_SIMULATE": None, "HF_MPS_KERNELS": None}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "test_theirs.py").write_text(SUITE, encoding="utf-8")
    return tmp_path


def test_a_suite_runs_a_releases_kernels(suite: Path, run_python: Run, release: str) -> None:
    ended = run_python(*OPTIONS, f"--metal-kernels={release}", cwd=suite, env=PLAIN)
    assert f"; computing with torch {release}'s own Metal kernels)\n" in ended.stdout
    assert "4 passed" in ended.stdout, ended.stdout
    assert ended.stdout.count(f"launches that are Metal kernels on a Mac ran torch {release}'s own") == 1
    assert ended.stderr == ""


def test_without_the_option_the_fixture_skips_with_the_reason(suite: Path, run_python: Run) -> None:
    ended = run_python(*OPTIONS, "--simulated-metal", "-k", "gelu", cwd=suite, env=PLAIN)
    assert "needs PyTorch's own Metal kernels: pytest --metal-kernels=RELEASE" in ended.stdout
    assert ended.returncode == 0


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            "banana",
            snapshot(
                "--metal-kernels=banana: 'banana' is no release of PyTorch; allowed: a version, for example 2.13.0"
            ),
        ),
        (
            ",checked",
            snapshot(
                "--metal-kernels=,checked: names no release; allowed: RELEASE or RELEASE,checked, for example 2.13.0"
            ),
        ),
    ],
)
def test_a_value_that_cannot_run_ends_in_one_line(own_cache: Path, value: str, line: str) -> None:
    before = dict(os.environ)
    given = SimpleNamespace(metal_kernels=value, simulated_metal=None)
    with pytest.raises(pytest.UsageError) as error:
        pytest_plugin.pytest_load_initial_conftests(SimpleNamespace(known_args_namespace=given))
    assert str(error.value) == line
    assert dict(os.environ) == before


def test_kernels_are_enabled_where_the_device_is_there_already_and_disabled_at_the_end(release: str) -> None:
    before = dict(os.environ)
    given = SimpleNamespace(metal_kernels=release, simulated_metal=None)
    pytest_plugin.pytest_load_initial_conftests(SimpleNamespace(known_args_namespace=given))
    try:
        counting = kernels.counting()
        torch.ones(4, device="mps")
        assert counting.release == os.environ["HF_MPS_KERNELS"] == release
        assert counting.kernels == {"fill_scalar_dense_float": 1}
    finally:
        pytest_plugin.pytest_unconfigure()
    assert kernels.running() is None
    assert dict(os.environ) == before


def test_workers_counts_add_up() -> None:
    one = Counts(
        Counter({"aten::add.Tensor": 3}),
        Counter({"add.Tensor": 2}),
        Counter({"k": 2}),
        Counter({("add.Tensor", "why"): 1}),
    )
    sent = Counts.from_plain(json.loads(json.dumps(one.plain())))
    assert sent == one
    node = SimpleNamespace(workeroutput={pytest_plugin.WORKER_COUNTS: ("2.13.0", one.plain())})
    said: list[str] = []
    pytest_plugin.pytest_testnodedown(node)
    pytest_plugin.pytest_testnodedown(node)
    pytest_plugin.pytest_testnodedown(SimpleNamespace())
    pytest_plugin.pytest_terminal_summary(SimpleNamespace(write_line=said.append))
    assert said == snapshot(
        [
            "hf_mps: 4 of 6 launches that are Metal kernels on a Mac ran torch 2.13.0's own (1 kernels); as"
            " without kernels: aten::add.Tensor (2)"
        ]
    )
