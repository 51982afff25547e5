"""PyTorch's own samples of missing operators, an eighth of them in a run (tests/share.py).

Results, gradients, out= and in-place forms equal the CPU's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from hf_mps.core.releases import torch_release
from hf_mps.metal import fallback
from tests import CHECKOUT, share

pytestmark = [pytest.mark.slow, pytest.mark.together]

# conj_physical_ asks a table of kernels by device that only a Mac's PyTorch fills; no fallback is involved.
OF_THE_SIMULATOR = ("svd complex64 out",)
# Operators with samples that have no Metal kernel; the fewer, the newer torch is.
LEAST = (55 if torch_release() < (2, 14) else 35) if share.is_whole() else 1


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    # What Metal's own kernels refuse (complex matrices in the gradients of linalg.eig) is no fallback's matter.
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_MPS_FALLBACK": "quiet",
        "HF_MPS_FAULTS": "-refusals,-dtype-results",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.metal.fallback.opinfo_worker"],
        cwd=CHECKOUT,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def unexplained(differences: list[str]) -> list[str]:
    return [one for one in differences if not one.startswith(OF_THE_SIMULATOR)]


def test_every_sample_gives_what_the_cpu_gives(report) -> None:
    assert report["operators"] >= LEAST
    assert unexplained(report["as it comes"]) == []


def test_copying_gives_it(report) -> None:
    assert unexplained(report["copied"]) == []
    shared, calls = report["copied calls"]
    assert shared == 0
    assert calls > (1000 if share.is_whole() else 0)


def test_sharing_memory_gives_it(report) -> None:
    if "shared" not in report:
        pytest.skip("this torch lends no device buffers (2.13 does)")
    assert unexplained(report["shared"]) == []
    shared, calls = report["shared calls"]
    least = 0.75 if share.is_whole() else 0.25  # an eighth may have many of the others
    assert shared > least * calls, "the rest has nothing to share: zero-sized tensors, out= tensors that must grow"


def test_nearly_half_of_the_missing_operators_have_samples(report) -> None:
    """The others are called by name in test_calls.py."""
    assert len(report["seen"]) >= LEAST
    assert set(report["seen"]) <= set(fallback.registered())
