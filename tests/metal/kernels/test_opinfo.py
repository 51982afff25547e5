"""PyTorch's own samples of operators with a launch rule, an eighth of them in a run (tests/share.py).

Metal's kernels give the CPU's results and gradients.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests import CHECKOUT, share

pytestmark = pytest.mark.slow

TIES = "equal values, of which halves have many, come in another order where a stable one is not asked for"
HALF = "a few elements beyond the room, at most twice: as where the half itself holds the point that is sampled"
DIFFERENT: dict[str, str] = {
    **{f"{name} {dtype}": TIES for name in ("sort", "argsort") for dtype in ("float16", "bfloat16")},
    "topk bfloat16": TIES,
    "grid_sampler_2d float16": HALF,
    "grid_sampler_2d bfloat16": HALF,
}
"""Operators of op_db whose samples differ, each with the reason; a dtype follows the name where it is one's alone."""
OPERATORS, SAMPLES, RULES = 400, 5500, 190
"""At the least: operators of op_db that launch a release's kernels, their samples, and aten operators of rules."""


@pytest.fixture(scope="module")
def report(release: str) -> dict[str, Any]:
    settings = {"HF_MPS_KERNELS": release, "HF_MPS_SIMULATE": "1", "HF_MPS_FALLBACK": "quiet", "OMP_NUM_THREADS": "1"}
    # What Metal refuses, complex matrices in the gradients of linalg.eig, is what test_calibration.py holds.
    settings["HF_MPS_FAULTS"] = "-refusals,-dtype-results"
    done = subprocess.run(
        [sys.executable, "-m", "tests.metal.kernels.opinfo_worker"],
        cwd=CHECKOUT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_nearly_every_sample_agrees_and_the_rest_has_a_reason(report: dict[str, Any]) -> None:
    unexplained = [
        f"{one['operator']} {one['dtype']} {one['form']}: {one['detail']}"
        for one in report["differences"]
        if not {one["operator"], f"{one['operator']} {one['dtype']}"} & DIFFERENT.keys()
    ]
    assert unexplained == []


def test_the_list_has_nothing_that_agrees(report: dict[str, Any]) -> None:
    differ = {one["operator"] for one in report["differences"]}
    differ |= {f"{one['operator']} {one['dtype']}" for one in report["differences"]}
    # A share draws other samples than the whole: halves may have no equal values there.
    if share.is_whole():
        assert DIFFERENT.keys() - differ == set()


def test_rules_ran(report: dict[str, Any]) -> None:
    parts = 1 if share.is_whole() else 2 * share.SHARES
    assert report["operators"] >= OPERATORS // parts
    assert report["samples"] >= SAMPLES // parts
    assert len(report["ran"]) >= RULES // parts
