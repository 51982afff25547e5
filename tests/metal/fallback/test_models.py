"""Real models whose training needs missing operators: the CPU's loss curve, and a ledger that names just those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mps.core.releases import torch_release
from hf_mps.metal.fallback import registration

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("models.py")
EXPECTED = {
    "ctc": {"aten::_ctc_loss", "aten::_ctc_loss_backward"},
    "pool": {"aten::adaptive_max_pool3d", "aten::adaptive_max_pool3d_backward"},
}


def train(run_python, model: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """What a training gave on the device and what it gave on the CPU, in one process, and all that it said."""
    env = {"HF_MPS_SIMULATE": "1", "HF_MPS_FALLBACK": None, "PYTORCH_ENABLE_MPS_FALLBACK": None, "OMP_NUM_THREADS": "1"}
    done = run_python(SCRIPT, model, "out", "mps", "cpu", env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    on_device, on_cpu = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"device"'))
    assert (on_device["device"], on_cpu["device"]) == ("mps", "cpu")
    return on_device, on_cpu, done.stderr


def lacking(names: list[str]) -> set[str]:
    """Of the operators that were called, and of the out= forms that they end in, those without a Metal kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    serves = ("MPS", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    found = set()
    with registration.suspended():
        everything = torch._C._dispatch_get_all_op_names()
        for name in names:
            family = [name]
            if has(name, "CompositeExplicitAutogradNonFunctional") and not has(name, "MPS"):
                base = name.partition(".")[0]
                family += [other for other in everything if other.partition(".")[0] == base]
            found |= {one for one in family if has(one, "CPU") and not any(has(one, key) for key in serves)}
    return found


@pytest.mark.parametrize("model", EXPECTED)
def test_it_trains_with_the_cpus_losses_and_the_ledger_names_what_is_lacking(run_python, model: str) -> None:
    on_device, on_cpu, told = train(run_python, model)
    assert len(on_device["losses"]) == 10
    assert on_device["losses"] == pytest.approx(on_cpu["losses"], abs=1e-4)
    assert on_device["losses"][-1] < on_device["losses"][0]
    assert set(on_device["ledger"]) == lacking(on_device["called"])
    # Metal has its own kernels for CTC from 2.14 on.
    expected = EXPECTED[model] if model == "pool" or torch_release() < (2, 14) else set()
    assert {name.partition(".")[0] for name in on_device["ledger"]} == expected
    assert told.count("without a Metal kernel ran on the CPU") == bool(expected), "one table, and not again at exit"
    if expected:
        assert all(seconds > 0 for seconds in on_device["fallback_seconds"])
        assert {entry["operator"] for entry in on_device["for results.json"]} == set(on_device["ledger"])
        assert all(entry["calls"] == 10 for entry in on_device["for results.json"])
    assert on_cpu["ledger"] == []


def test_a_training_without_missing_operators_logs_nothing_of_them(run_python, tmp_path: Path) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
import models, torch
models.Pool.__init__ = lambda self: (torch.nn.Module.__init__(self), setattr(
    self, "layers", torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(216, 2))))[0]
models.train("pool", "out", "mps")
"""
    done = run_python("-c", code, env={"HF_MPS_SIMULATE": "1"})
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["ledger"] == []
    assert result["fallback_seconds"] == [None] * 10
    assert "without a Metal kernel" not in done.stderr
