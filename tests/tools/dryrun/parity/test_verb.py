"""`hf-mps parity` and `finetune --check-parity`: every recipe agrees on both devices, and a training waits for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.cli.main import main
from hf_mps.layer import guards
from hf_mps.tools.dryrun.parity.compare import TOLERANCES, Divergence, Parity, Step, compare, verdict
from hf_mps.tools.dryrun.parity.trace import FORWARD, GRADIENT, Trace, digest
from tests import hazards


def trace(device: str, *, weight: float = 1.0, noise: float = 0.0) -> Trace:
    """Two modules forward and a gradient each; `weight` scales the second one's results, `noise` a tiny gradient."""
    made = Trace(device, losses=[1.0], norms=[2.0])
    made.events[(1, FORWARD, "first", "call 1")] = digest(torch.ones(8))
    made.events[(1, FORWARD, "second", "call 1")] = digest(torch.ones(8) * weight)
    made.events[(1, GRADIENT, "second", "weight")] = digest(torch.ones(8))
    made.events[(1, GRADIENT, "second", "bias")] = digest(torch.full((8,), 1e-9 + noise))
    return made


def test_the_first_module_that_differs_is_named_and_the_size_of_it() -> None:
    found = compare(trace("cpu"), trace("mps", weight=1.5))
    assert found.divergence == Divergence(1, FORWARD, "second", "call 1", pytest.approx(0.5))
    assert verdict(found) == snapshot(
        "different, first at step 1, forward: second (call 1), off by 0.5 (mps is simulated)"
    )


def test_a_gradient_that_is_rounding_beside_the_others_is_not_compared_by_itself() -> None:
    assert compare(trace("cpu"), trace("mps", noise=1e-7)).same
    assert not compare(trace("cpu"), trace("mps", noise=1e-2)).same


def test_a_nan_on_one_device_is_a_difference() -> None:
    found = compare(trace("cpu"), trace("mps", weight=float("nan")))
    assert found.divergence.rel_error == float("inf")


def test_a_loss_that_is_off_is_told_where_no_module_is() -> None:
    found = Parity((Step(1, (1.0, 1.0), (2.0, 2.0)), Step(2, (1.0, 1.1), (2.0, 2.0))), None, TOLERANCES["fp32"])
    assert not found.same
    assert verdict(found) == snapshot(
        "different: loss or gradient norm of step 2 is off by 0.1, and no module's values are (mps is simulated)"
    )


def test_every_recipe_agrees_on_both_devices(each_recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", each_recipe, "--steps", "2", "--rows", "2", "--json"]) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["same"] is True
    assert found["simulated"] is True
    assert found["divergence"] is None
    assert len(found["steps"]) == 2
    assert all(step["off"] < found["tolerance"]["value"] for step in found["steps"])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_compared_with_the_cpus_float32(precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parity", "glue/mrpc", f"training.{precision}=true", "--steps", "2", "--rows", "2", "--json"]
    assert main(words) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["precision"]["value"] == precision
    assert 1e-5 < max(step["off"] for step in found["steps"]) < found["tolerance"]["value"]


CLASSIFY = """
task: text-classification
model: google-bert/bert-base-cased
data: {files: {train: rows.json, validation: rows.json}, columns: {text: sentence1}}
training: {optim: adamw_torch, per_device_train_batch_size: 2}
"""


def test_misuse_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parity", "glue/mrcp"]) == 2
    assert main(["finetune", "quickstart", "--check-parity", "--plan"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert "'glue/mrcp' is not a recipe" in told[0]
    assert told[1:] == snapshot(["hf-mps: --check-parity cannot be combined with --plan; give one of them"])


@pytest.mark.slow
def test_a_training_does_not_begin_where_the_devices_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(CLASSIFY, encoding="utf-8")
    (tmp_path / "rows.json").write_text('{"sentence1": "a", "label": 1}\n', encoding="utf-8")
    with hazards.kernels({"native_layer_norm": _doubled}), guards.suspended():
        assert main(["finetune", "my.yaml", "--check-parity"]) == 1
    told = capsys.readouterr()
    assert "parity: different, first at step 1, forward: bert.embeddings.LayerNorm (call 1), off by 1" in told.out
    assert "nothing was trained; the whole comparison: hf-mps parity my.yaml" in told.err
    assert not (tmp_path / "runs").exists()


def _doubled(input: Any, shape: Any, weight: Any, bias: Any, eps: Any) -> Any:
    """A layer norm that gives twice what it should."""
    given = [each if each is None else hazards.host(each) for each in (weight, bias)]
    out, *rest = torch.native_layer_norm(hazards.host(input), shape, given[0], given[1], eps)
    return tuple(each.to("mps") for each in (out * 2, *rest))
