"""Real CUDA graphs: the numbers of eager steps, dropout included; what cannot be recorded leaves the device sound.

Needs an NVIDIA GPU; elsewhere these tests are skipped, and test_steps.py asks the same of a stand-in.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_mps.finetune.cuda_graphs.graphs import Graphs, RecordingFailed
from hf_mps.layer.fused_step import joint_projections, spans, switch
from tests.distributed.launching import launch
from tests.finetune.cuda_graphs import several
from tests.finetune.cuda_graphs.recorders import captured, history, model, trainer, weights

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    "accumulation with a remainder": {"gradient_accumulation_steps": 4},
    "sgd": {"optim": "sgd"},
    "no clipping": {"max_grad_norm": 0.0},
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_training_as_without(tmp_path: Path, case: str) -> None:
    plain = trainer(tmp_path / "plain", cuda=True, **CASES[case])
    plain.train()
    ours = trainer(tmp_path / "ours", cuda=True, **CASES[case])
    account = captured(ours)
    ours.train()
    assert (account.replayed, account.eager.total()) == (17, 1)
    half = "16" in case
    for name, values in history(plain).items():
        assert history(ours)[name] == pytest.approx(values, rel=2e-2 if half else 1e-4), name
    torch.testing.assert_close(weights(ours), weights(plain), rtol=1e-2, atol=2e-2 if half else 1e-4)


def test_a_run_that_stops_goes_on_as_an_unbroken_one(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", cuda=True, save_strategy="steps", save_steps=8)
    captured(whole)
    whole.train()
    on = trainer(tmp_path / "on", cuda=True)
    captured(on)
    on.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-8"))
    assert history(on)["loss"] == pytest.approx(history(whole)["loss"], rel=1e-4)
    torch.testing.assert_close(weights(on), weights(whole), rtol=1e-3, atol=1e-4)


class Waits(torch.nn.Module):
    """A layer that looks at a number."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Any) -> Any:
        return self.inner(hidden) if float(hidden.sum()) > -1e9 else hidden


def test_what_cannot_be_recorded_runs_on_without(tmp_path: Path) -> None:
    def waiting() -> Any:
        made = model()
        made.dropout = Waits(made.dropout)
        return made

    plain = trainer(tmp_path / "plain", waiting(), cuda=True)
    plain.train()
    ours = trainer(tmp_path / "ours", waiting(), cuda=True)
    account = captured(ours)
    ours.train()
    assert account.replayed == 0
    assert "reads a number from the device" in str(account.outcome())
    assert history(ours)["loss"] == pytest.approx(history(plain)["loss"], rel=1e-4)


def test_a_failed_recording_leaves_random_numbers_and_memory_sound() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4, device="cuda")
    torch.manual_seed(0)

    def reads(inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        drawn = torch.nn.functional.dropout(inputs["x"])
        return (drawn * drawn.sum().item(),)

    with pytest.raises(RecordingFailed):
        Graphs().run("k", {"x": torch.ones(4, device="cuda")}, reads)
    assert torch.equal(torch.rand(4, device="cuda"), expected)
    torch.cuda.empty_cache()
    drawn, *_ = Graphs().run(
        "k", {"x": torch.ones(1000, device="cuda")}, lambda inputs: (torch.nn.functional.dropout(inputs["x"]),)
    )
    assert drawn is not None
    assert 300 < int((drawn == 0).sum()) < 700


def test_a_replay_draws_what_an_eager_pass_draws() -> None:
    x = torch.ones(1000, device="cuda")
    torch.manual_seed(7)
    eager = [torch.nn.functional.dropout(x) for _ in range(3)]
    graphs = Graphs()
    torch.manual_seed(7)
    for expected in eager:
        found, *_ = graphs.run("k", {"x": x}, lambda inputs: (torch.nn.functional.dropout(inputs["x"]),))
        assert found is not None
        assert torch.equal(found, expected)


def test_queries_keys_and_values_as_one_product_train_alike_within_a_graph(tmp_path: Path) -> None:
    plain = trainer(tmp_path / "plain", cuda=True)
    plain.train()
    ours = trainer(tmp_path / "ours", cuda=True)
    account = captured(ours)
    chosen = switch.choose(None, ours.model, "cuda")
    assert chosen.value.parts == (joint_projections.JOINT_PROJECTIONS.what,)
    with switch.running(chosen, "cuda"):
        ours.train()
    assert (account.replayed, account.eager.total()) == (17, 1)
    layer = ours.model.bert.encoder.layer[0].attention.self
    assert spans.joined([layer.query.weight, layer.key.weight, layer.value.weight], 0) is not None
    for name, values in history(plain).items():
        assert history(ours)[name] == pytest.approx(values, rel=1e-3), name


def test_two_ranks_train_as_under_ddp(tmp_path: Path) -> None:
    """On a GPU each, or both on one."""
    root = Path(__file__).resolve().parents[3]
    module = ("-m", "tests.finetune.cuda_graphs.several")
    env = {
        "HF_MPS": "0",
        "HF_MPS_DEVICE": "cuda",
        "PYTHONPATH": os.pathsep.join([str(root / "scripts/bench"), *sys.path]),
    }
    ended = launch(2, *module, tmp_path, "cuda", *several.CASES, cwd=root, env=env)
    assert ended.returncode == 0, ended.stderr
    for rank in range(2):
        for case, said in json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8")).items():
            assert said["replayed"] == 7, (case, said["eager"])
            assert said["ours"]["loss"] == pytest.approx(said["plain"]["loss"], rel=1e-4), case
