"""What transformers' Trainer does by default and should not on Metal; what the user asked for stays."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import HfArgumentParser, Seq2SeqTrainingArguments, TrainerCallback, TrainingArguments

from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.explicit_args import was_given
from tests.layer.guards import loops
from tests.layer.guards.experiments import failures


def of_pinning(train: Callable[[], object]) -> list[str]:
    """What is said of pinned memory."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train()
    return [str(each.message) for each in told if "pin_memory" in str(each.message)]


def test_no_loader_of_a_trainer_warns_of_pinned_memory_unless_the_user_asked_for_it(tmp_path: Path) -> None:
    assert of_pinning(lambda: loops.trained(tmp_path, max_steps=1)) == []
    (line,) = guards.get("pin-memory").lines
    assert line == snapshot("nothing is pinned for Trainer's loaders: CPU and GPU share their memory")
    (stocks,) = of_pinning(lambda: loops.trained(tmp_path, max_steps=1, dataloader_pin_memory=True))
    assert "not supported on MPS" in stocks
    own = torch.utils.data.DataLoader([1.0], pin_memory=True)  # type: ignore[arg-type]
    assert len(of_pinning(lambda: list(own))) == 1


def test_a_trainer_s_loaders_say_what_they_were_asked_for(tmp_path: Path) -> None:
    run = loops.trainer(tmp_path)
    loaders = [run.get_train_dataloader(), run.get_eval_dataloader(loops.rows())]
    assert [loader.pin_memory for loader in loaders] == [True, True]
    next(iter(loaders[0]))
    assert loaders[0].pin_memory


def test_a_loss_that_is_no_number_is_shown_for_the_steps_that_had_it(tmp_path: Path) -> None:
    model = loops.Diverging()
    model.weight.register_hook(lambda gradient: torch.zeros_like(gradient))  # the weights stay numbers
    run = loops.trainer(tmp_path, model, max_grad_norm=0)
    seen: list[bool] = []

    class Reads(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, *_: Any, **__: Any) -> None:
            seen.append(args.logging_nan_inf_filter)

    run.add_callback(Reads())
    with guards.suspended(kind="sentinel"):
        run.train()
    assert [math.isfinite(loss) for loss in failures.losses(run)] == [True, False, True, True]
    assert seen == [True] * 4  # what others read is what stands there


@pytest.mark.parametrize("kind", [TrainingArguments, Seq2SeqTrainingArguments])
def test_what_the_user_said_is_known(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = kind(str(tmp_path), dataloader_pin_memory=True)
    assert was_given(arguments, "output_dir")
    assert was_given(arguments, "dataloader_pin_memory")
    assert not was_given(arguments, "logging_nan_inf_filter")
    for words, expected in (
        (["--dataloader_pin_memory", "True"], True),
        (["--no_dataloader_pin_memory"], True),
        ([], False),
    ):
        monkeypatch.setattr(sys, "argv", ["run.py", "--output_dir", str(tmp_path), *words])
        (parsed,) = HfArgumentParser(kind).parse_args_into_dataclasses()
        assert was_given(parsed, "dataloader_pin_memory") is expected


def test_batches_of_an_accelerate_loop_too_whatever_their_shape() -> None:
    wide = torch.ones(2, dtype=torch.float64)
    rows = [{"a": wide, "b": [wide, torch.ones(2, dtype=torch.long)], "c": (wide.half(),)}]
    loader = loops.new_accelerator().prepare(torch.utils.data.DataLoader(rows, batch_size=None))
    with pytest.warns(GuardNotice, match="Metal has: a, b "):
        (batch,) = list(loader)
    kinds = [batch["a"].dtype, batch["b"][0].dtype, batch["b"][1].dtype, batch["c"][0].dtype]
    assert kinds == [torch.float32, torch.float32, torch.int64, torch.float16]
    assert rows[0]["a"].dtype == torch.float64


@pytest.mark.nightly
def test_several_processes_on_the_cpu_are_not(run_python: Any) -> None:
    code = "import accelerate; accelerate.Accelerator(); print('went on')"
    done = run_python("-c", code, env={"WORLD_SIZE": "1", "HF_MPS_DEVICE": "cpu"})
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
    try:
        loops.trainer(tmp_path, save_strategy="steps", save_steps=2, use_cpu=True).train()
    finally:
        loops.forget_accelerators()  # the next test's would be on the CPU too
    assert not list(tmp_path.rglob("mps_rng_state*"))
