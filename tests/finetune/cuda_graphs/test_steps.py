"""Trainer's steps by graphs: its own loop, the numbers of plain steps, and what cannot be recorded runs beside them.

Here a recorder on the CPU stands in for CUDA's; tests/finetune/cuda_graphs/test_on_cuda.py asks the same of real
graphs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from hf_mps.core.errors import RunError
from hf_mps.finetune.cuda_graphs import graphs
from hf_mps.finetune.cuda_graphs.graphs import RecordingFailed
from tests.finetune.cuda_graphs.recorders import Rerun, captured, history, model, trainer, weights

CASES: dict[str, dict[str, Any]] = {
    "a batch a step": {},
    "accumulation with a remainder": {"gradient_accumulation_steps": 4},
    "no clipping": {"max_grad_norm": 0.0},
    "a schedule that warms up": {"lr_scheduler_type": "cosine", "warmup_steps": 5},
    "an optimizer that takes no rate from the device": {"optim": "sgd"},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


def close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal but for the rounding of a learning rate that is a float32 number on the device."""
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_the_same_training_as_without(tmp_path: Path, case: str) -> None:
    plain = trainer(tmp_path / "plain", **CASES[case])
    plain.train()
    ours = trainer(tmp_path / "ours", **CASES[case])
    recorder = Rerun()
    account = captured(ours, recorder=recorder)
    ours.train()

    close(history(ours), history(plain))
    close(weights(ours), weights(plain))
    assert ours.state.total_flos == plain.state.total_flos
    assert (account.replayed, account.eager.total()) == (17, 1)
    assert recorder.recordings == 4  # three widths, and the short last batch


def test_what_a_finished_run_says(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    account = captured(ours, recorder=Rerun())
    ours.train()
    assert str(account.outcome()) == snapshot(
        "whole steps (17 of 18 batches by 4 graphs, one for each shape; 1 without: the first step, which loads kernels"
        " and makes the optimizer's state)"
    )


def test_a_run_that_stops_goes_on_as_an_unbroken_one(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    captured(whole, recorder=Rerun())
    whole.train()

    broken = trainer(tmp_path / "broken", save_strategy="steps", save_steps=8)
    captured(broken, recorder=Rerun())
    broken.train()
    groups = torch.load(tmp_path / "broken/checkpoint-8/optimizer.pt", weights_only=True)["param_groups"]
    assert {type(group["lr"]) for group in groups} == {float}
    assert not any(group["capturable"] for group in groups)

    on = trainer(tmp_path / "broken", save_strategy="no")
    captured(on, recorder=Rerun())
    on.train(resume_from_checkpoint=str(tmp_path / "broken/checkpoint-8"))
    # Not to the last bit: a CPU's products may depend on where a tensor begins in memory, and a recording has its own.
    close({"loss": history(on)["loss"][8:]}, {"loss": history(whole)["loss"][8:]})
    close(weights(on), weights(whole))


def test_more_shapes_than_are_kept_run_beside_the_graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    plain = trainer(tmp_path / "plain")
    plain.train()
    ours = trainer(tmp_path / "ours")
    account = captured(ours, recorder=Rerun())
    ours.train()
    assert account.replayed == 11
    assert sorted(account.eager.values()) == [1, 6]
    close(history(ours), history(plain))


class Fails(Rerun):
    """A recorder that refuses the third recording, as CUDA refuses one that reads a number from the device."""

    def __call__(self, body: Any) -> Any:
        if self.recordings == 2:
            raise RecordingFailed("the step reads a number")
        return super().__call__(body)


def test_what_cannot_be_recorded_runs_on_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = trainer(tmp_path / "plain")
    plain.train()
    ours = trainer(tmp_path / "ours")
    account = captured(ours, recorder=Fails())
    ours.train()
    close(history(ours), history(plain))
    close(weights(ours), weights(plain))
    assert "the step reads a number" in str(account.outcome())
    assert account.replayed == 3
    told = re.findall("hf-mps: no CUDA graphs: .*", capsys.readouterr().err)
    assert told == snapshot(["hf-mps: no CUDA graphs: the step reads a number; steps run one operator at a time"])


def test_a_recipe_that_asks_for_graphs_ends_in_one_line(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    captured(ours, recorder=Fails(), required=True)
    with pytest.raises(RunError) as raised:
        ours.train()
    assert str(raised.value) == snapshot(
        "cuda_graphs is true, and the step reads a number; next: the same recipe without it"
    )


class Grows(torch.nn.Module):
    """A layer that makes its table anew in a step."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("table", torch.ones(()), persistent=False)

    def forward(self, hidden: Any) -> Any:
        self.table = torch.ones(()) * 1.0
        return self.inner(hidden) * self.table


def test_a_model_that_replaces_a_buffer_runs_on_with_its_own(tmp_path: Path) -> None:
    made = model()
    made.dropout = Grows(made.dropout)
    ours = trainer(tmp_path, made)
    account = captured(ours, recorder=Rerun())
    ours.train()
    assert account.replayed == 0
    assert "the model replaces its buffer table within a step" in str(account.outcome())
    assert len(history(ours)["loss"]) == 18


def test_nothing_of_it_is_left_when_it_ends(tmp_path: Path) -> None:
    ours = trainer(tmp_path)
    account = captured(ours, recorder=Rerun())
    ours.train()
    account.close()
    assert "zero_grad" not in vars(ours.model)
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    ours.model.eval()
    assert ours.step_method is account
