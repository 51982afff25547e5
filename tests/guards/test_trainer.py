"""What transformers' Trainer does by default and should not on Metal; what the user asked for stays."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments

from hf_mps import guards, sentinels
from hf_mps.errors import RunError, UserError
from hf_mps.guards import GuardNotice
from hf_mps.guards.said import said
from tests.guards import loops


class Diverging(nn.Module):
    """A model whose loss is no number from its second batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.batches = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.batches += 1
        loss = (self.weight - 1).square().sum()
        return {"loss": loss * float("nan") if self.batches > 1 else loss, "logits": self.weight[None]}


def losses(run: Any) -> list[float]:
    return [each["loss"] for each in run.state.log_history if "loss" in each]


def test_without_the_guard_a_loss_that_is_no_number_is_hidden(tmp_path: Path) -> None:
    with guards.suspended("nan-hidden"), sentinels.suspended("non-finite"):
        run = loops.trainer(tmp_path, Diverging())
        run.train()
    assert len(losses(run)) == 4
    assert np.isfinite(losses(run)).all()


def test_with_it_the_run_stops_and_says_where(tmp_path: Path) -> None:
    with pytest.warns(GuardNotice, match="logging_nan_inf_filter is off"):
        run = loops.trainer(tmp_path, Diverging())
    with pytest.raises(RunError, match=r"loss is nan at step 2 of 4; next: a lower learning_rate \(now 0.01\)"):
        run.train()


def test_a_filter_that_the_user_asked_for_stays(tmp_path: Path) -> None:
    run = loops.trainer(tmp_path, Diverging(), logging_nan_inf_filter=True)
    run.train()
    assert run.args.logging_nan_inf_filter
    assert np.isfinite(losses(run)).all()


def test_without_the_guard_every_loader_warns_of_pinned_memory(tmp_path: Path) -> None:
    with guards.suspended("pin-memory"), pytest.warns(UserWarning, match="'pin_memory' argument is set as true"):
        loops.trained(tmp_path, max_steps=1)


def test_with_it_none_does_and_one_line_says_why(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loops.trained(tmp_path, max_steps=1)
    lines = [str(each.message) for each in told if "pin_memory" in str(each.message)]
    assert len(lines) == 1
    assert "there is nothing to pin (pin-memory:" in lines[0]


def test_pinned_memory_that_the_user_asked_for_stays(tmp_path: Path) -> None:
    assert loops.trainer(tmp_path, dataloader_pin_memory=True).args.dataloader_pin_memory


@pytest.mark.parametrize("kind", [TrainingArguments, Seq2SeqTrainingArguments])
def test_what_the_user_said_is_known(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = kind(str(tmp_path), dataloader_pin_memory=True)
    assert said(arguments, "output_dir")
    assert said(arguments, "dataloader_pin_memory")
    assert not said(arguments, "logging_nan_inf_filter")
    for words, expected in (
        (["--dataloader_pin_memory", "True"], True),
        (["--no_dataloader_pin_memory"], True),
        ([], False),
    ):
        monkeypatch.setattr(sys, "argv", ["run.py", "--output_dir", str(tmp_path), *words])
        (parsed,) = HfArgumentParser(kind).parse_args_into_dataclasses()
        assert said(parsed, "dataloader_pin_memory") is expected


def with_floats() -> list[dict[str, Any]]:
    """Rows with a column of NumPy's own floats."""
    return [{"x": np.full(3, number / 8), "labels": number % 2} for number in range(8)]


class OnFloats(nn.Module):
    """A model over such a column."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_without_the_guard_a_float64_column_ends_the_run(tmp_path: Path) -> None:
    with guards.suspended("float64-columns"), pytest.raises(TypeError, match="doesn't support float64"):
        loops.trained(tmp_path, model=OnFloats(), data=with_floats())


def test_with_it_the_column_becomes_float32(tmp_path: Path) -> None:
    with pytest.warns(GuardNotice, match="float64 became float32, which Metal has: x "):
        loops.trained(tmp_path, model=OnFloats(), data=with_floats())


def test_batches_of_an_accelerate_loop_too_whatever_their_shape() -> None:
    wide = torch.ones(2, dtype=torch.float64)
    rows = [{"a": wide, "b": [wide, torch.ones(2, dtype=torch.long)], "c": (wide.half(),)}]
    loader = loops.new_accelerator().prepare(torch.utils.data.DataLoader(rows, batch_size=None))
    with pytest.warns(GuardNotice, match="Metal has: a, b "):
        (batch,) = list(loader)
    kinds = [batch["a"].dtype, batch["b"][0].dtype, batch["b"][1].dtype, batch["c"][0].dtype]
    assert kinds == [torch.float32, torch.float32, torch.int64, torch.float16]
    assert rows[0]["a"].dtype == torch.float64


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "paged_adamw_32bit", "lion_8bit"])
def test_optimizers_whose_kernels_are_for_cuda_are_refused_in_a_line(optim: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"optim={optim}: .*next: adamw_torch") as refusal:
        loops.trainer(tmp_path, optim=optim)
    assert "\n" not in str(refusal.value)


class Adam8bit(torch.optim.SGD):
    """Made as bitsandbytes makes its own, on top of torch's."""

    __module__ = "bitsandbytes.optim.adam"


def test_one_that_a_loop_makes_itself_is_refused_too() -> None:
    with pytest.raises(UserError, match=r"^Adam8bit: .*next: torch.optim.AdamW, or Adafactor"):
        Adam8bit([nn.Parameter(torch.ones(2, device="mps"))])
    before_it_moved = Adam8bit([nn.Parameter(torch.ones(2))])
    with pytest.raises(UserError, match=r"^Adam8bit: "):
        loops.new_accelerator().prepare_optimizer(before_it_moved)


def test_memory_metrics_end_in_a_type_error_without_the_guard(tmp_path: Path) -> None:
    with guards.suspended("memory-metrics"):
        run = loops.trainer(tmp_path, skip_memory_metrics=False, max_steps=1)
        metrics = run.train().metrics
        with pytest.raises(TypeError):
            run.log_metrics("train", metrics)


class Hungry(TrainerCallback):  # type: ignore[misc]
    """Holds 64 MB of the device for a moment in the first step."""

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        import time

        held = torch.ones(16_000_000, device="mps")
        time.sleep(0.2)
        del held


def test_with_it_they_have_a_true_peak(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = loops.trainer(tmp_path, callbacks=[Hungry()], skip_memory_metrics=False, max_steps=1)
    metrics = run.train().metrics
    run.log_metrics("train", metrics)
    assert "train_mem_gpu_peaked_delta" in capsys.readouterr().out
    assert metrics["train_mem_gpu_peaked_delta"] >= 60_000_000


SEVERAL = """
from transformers import TrainingArguments
import accelerate, sys
if "trainer" in sys.argv:
    TrainingArguments("out").device
else:
    accelerate.Accelerator()
print("went on")
"""


@pytest.mark.parametrize("way", ["trainer", "accelerate"])
def test_several_processes_on_the_one_device_are_refused(way: str, run_python: Any) -> None:
    launched: dict[str, str | None] = {"WORLD_SIZE": "2", "RANK": "0"}
    done = run_python("-c", SEVERAL, way, env=launched)
    assert done.returncode != 0
    assert "2 processes were started and there is one Metal device" in done.stderr.splitlines()[-1]
    unguarded = run_python("-c", SEVERAL, way, env={**launched, "HF_MPS_GUARDS": "-one-device"})
    assert "there is one Metal device" not in unguarded.stderr
    # accelerate 1.10 would have the address of the first process by then.
    assert "went on" in unguarded.stdout or "`MASTER_ADDR` env was not set" in unguarded.stderr


def test_a_notebook_s_launcher_starts_one_process_and_not_several() -> None:
    from accelerate import notebook_launcher

    ran: list[int] = []
    with pytest.raises(UserError, match=r"num_processes=2\): there is one Metal device, .*accumulation_steps=2 for"):
        notebook_launcher(ran.append, (1,), 2)
    assert ran == []


def test_several_processes_on_the_cpu_are_not(run_python: Any) -> None:
    done = run_python("-c", SEVERAL, "accelerate", env={"WORLD_SIZE": "1", "HF_MPS_DEVICE": "cpu"})
    assert "went on" in done.stdout, done.stderr


def test_a_resumed_run_says_when_its_checkpoint_has_no_state_of_the_device(tmp_path: Path) -> None:
    run = loops.trainer(tmp_path, save_strategy="steps", save_steps=2)
    run.train()
    state = tmp_path / "checkpoint-2" / "mps_rng_state.pth"
    assert not list(tmp_path.rglob("*.part"))
    state.unlink()
    with pytest.warns(
        GuardNotice, match=r"checkpoint-2 holds no mps_rng_state.pth: the resumed run draws other random"
    ):
        loops.trainer(tmp_path).train(resume_from_checkpoint=str(state.parent))


def test_no_file_is_added_on_the_cpu(tmp_path: Path) -> None:
    loops.trainer(tmp_path, save_strategy="steps", save_steps=2, use_cpu=True).train()
    assert not list(tmp_path.rglob("mps_rng_state*"))
