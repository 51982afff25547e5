"""A run that fails: one line, the exit code, nothing half-written, and the checkpoints that are kept named."""

from __future__ import annotations

import errno
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from inline_snapshot import snapshot
from transformers import Trainer

from hf_mps.finetune.data import load
from hf_mps.finetune.run import callbacks, failures, run_dir
from hf_mps.layer.guards.sentinels import stopped_gpu
from hf_mps.metal.simulator import strictness
from tests.finetune.tiny import Command
from tests.snapshots import masked


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    """A disk of `size` mounted at `place`; the test is skipped where that is not allowed."""
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False) if shutil.which("mount") else None
    if mounted is None or mounted.returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_full_cache_ends_the_run_in_one_line(desk: Path, finetune: Command) -> None:
    with small_disk(desk.parent / "cache", "12k"):
        ended = finetune("my.yaml")
    assert ended.code == 1
    assert masked(ended.err, cache=desk.parent / "cache") == snapshot(
        "hf-mps: no space is left on the disk: <cache>; next: room there, or HF_HOME=FOLDER on another disk\n"
    )
    assert not (desk / "runs").exists()


def test_ctrl_c_before_training_says_so(desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load", Mock(side_effect=KeyboardInterrupt))
    ended = finetune("my.yaml")
    assert (ended.code, ended.err) == (130, "hf-mps: interrupted\n")
    assert not (desk / "runs").exists()


def test_a_loss_that_is_no_number_stops_the_run(desk: Path, finetune: Command) -> None:
    ended = finetune("my.yaml", "training.learning_rate=1e38", "training.max_grad_norm=0")
    assert ended.code == 1
    assert ended.err.startswith("hf-mps: loss is nan at step ")
    assert "; next: a lower training.learning_rate (now 1e+38), or training.max_grad_norm=1; " in ended.err
    assert ended.err.count("\n") == 1
    assert not (desk / "runs/my/results.json").exists()


def test_a_loss_that_is_not_logged_stops_the_run_before_a_checkpoint(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Trainer.training_step

    def diverging(trainer: Trainer, model: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 2:
            next(model.parameters()).data.fill_(float("nan"))
        return stock(trainer, model, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", diverging)
    steps = ("training.logging_steps=500", "training.save_strategy=steps", "training.save_steps=1")
    ended = finetune("my.yaml", *steps, "training.load_best_model_at_end=false", "training.max_steps=6")
    assert ended.code == 1
    assert ended.err.startswith(
        "hf-mps: the loss is nan at optimizer step 3; next: a lower training.learning_rate (now"
    )
    assert sorted(each.name for each in run_dir.checkpoints(desk / "runs/my")) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.skipif(stopped_gpu._raises(), reason="this torch raises an error for it")
def test_a_gpu_that_macos_stops_ends_the_run_before_a_checkpoint(desk: Path, finetune: Command) -> None:
    steps = ("training.logging_steps=500", "training.save_strategy=steps", "training.save_steps=1")
    with strictness.stopping_gpu(8):
        ended = finetune("my.yaml", *steps, "training.load_best_model_at_end=false", "training.max_steps=30")
    assert ended.code == 1
    line = ended.err.splitlines()[-1]
    assert line.startswith("hf-mps: macOS aborted GPU work, and PyTorch continued with unwritten results (seen ")
    assert "; next: run it under `caffeinate -is` with the display asleep" in line
    assert "the same command goes on from the last checkpoint" in line
    assert len(run_dir.checkpoints(desk / "runs/my")) < 30
    assert not (desk / "runs/my/results.json").exists()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "x", "a.bin"), "no space is left on the disk: a.bin"),
        (OSError(errno.EDQUOT, "x"), "the disk quota is used up"),
        (OSError(errno.EFBIG, "x"), "a file grew over the limit for one file"),
        (Exception("I/O error: No space left on device (os error 28)"), "no space is left on the disk"),
        (RuntimeError("unexpected pos 64 vs 0"), "a file could not be written whole, as on a full disk"),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)\nmore"), None),
        (RuntimeError("Invalid buffer size: 9.75 GiB"), "out of memory: Invalid buffer size: 9.75 GiB"),
        (
            KeyError(
                "The `metric_for_best_model` training argument is set to 'eval_NoAns_f1', which is not found in the"
                " evaluation metrics."
            ),
            "no row of the evaluation gives NoAns_f1, which training.metric_for_best_model names",
        ),
        (
            NotImplementedError("The operator 'aten::_ctc_loss' is not currently implemented for the MPS device. If"),
            "the operator aten::_ctc_loss has no Metal kernel;"
            " next: PYTORCH_ENABLE_MPS_FALLBACK=1 and the same command",
        ),
    ],
)
def test_what_the_machine_refuses_is_told_describe(error: Exception, words: str | None) -> None:
    assert failures.describe(error) == (words or "out of memory: MPS backend out of memory (MPS allocated: 1 GB)")


def test_an_error_wrapped_in_another_is_found() -> None:
    outer = ValueError("could not save")
    outer.__cause__ = OSError(errno.ENOSPC, "x")
    assert failures.describe(outer) == snapshot("no space is left on the disk")
    assert failures.describe(ValueError("something else")) is None


def test_a_run_whose_folder_is_deleted_ends_with_a_checkpoint_that_the_same_command_goes_on_from(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def deletes(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            shutil.rmtree(desk / "runs")

    words = ("my.yaml", "training.save_strategy=steps", "training.save_steps=2")
    assert finetune(*words, "output_dir=whole").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(callbacks.OwnDraws, "on_step_begin", deletes, raising=False)
        ended = finetune(*words)
    assert (ended.code, ended.err) == (
        1,
        snapshot(
            "hf-mps: runs/my was deleted during the run; next: the same command, which goes on; kept:"
            " runs/my/checkpoint-4\n"
        ),
    )
    ended = finetune(*words).finished()
    assert "goes on from checkpoint-4" in ended.out
    assert {path.name for path in (desk / "runs/my").iterdir()} == {path.name for path in (desk / "whole").iterdir()}
    assert (desk / "runs/my/predictions.csv").read_bytes() == (desk / "whole/predictions.csv").read_bytes()
