"""The machine fails around a run: one line with a command that works, and the last good state kept.

A disk with too little room, a killed worker of a data loader and a deleted folder are in test_failures.py and
test_workers.py.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import Trainer

from hf_mps.cli.main import main
from hf_mps.core.files import replace_file
from hf_mps.finetune.run import callbacks, stages
from hf_mps.finetune.tasks import Task
from tests.finetune.run import broken_disk
from tests.finetune.tiny import Command, Ended, Stop

SAVING = ("training.save_strategy=steps", "training.save_steps=2", "training.load_best_model_at_end=false")

DISK = """
import contextlib, io, json, os, shlex, sys
from hf_mps.cli.main import main
from hf_mps.finetune.report import plot

plot._rendered = lambda figure: b""

def finetune(words, **broken):
    said, told = io.StringIO(), io.StringIO()
    os.environ.update(broken)
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
        code = main(words)
    for name in broken:
        del os.environ[name]
    return [code, told.getvalue()]

def tried(folder, **broken):
    words = ["finetune", "my.yaml", f"output_dir={folder}", "optimizations=false", "training.max_steps=4"]
    code, line = finetune([*words, *sys.argv[2:]], **broken)
    left = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    command = line.partition(", then hf-mps ")[2]
    after = finetune(shlex.split(command))[0] if command else 0
    return {"code": code, "line": line, "left": left, "after": after}

ended = {"whole": tried("whole")}
for folder, broken in json.loads(sys.argv[1]).items():
    ended[folder] = tried(folder, **broken)
print(json.dumps(ended))
"""


def next_command(ended: Ended) -> list[str]:
    """The words of the command that a line tells to type, as the shell hands them to hf-mps."""
    return shlex.split(ended.err.rpartition("hf-mps ")[2])


def refusing(path: str, error: int, kind: str = "WRITES") -> dict[str, str]:
    return {"BROKEN_PATH": path, f"BROKEN_{kind}": str(error)}


@pytest.mark.process
def test_a_disk_that_fails_wherever_a_run_writes_ends_it_in_one_line_whose_command_goes_on(desk: Path) -> None:
    full, read_only, denied, too_large = 28, 30, 13, 27
    faults = {
        "first": refusing("checkpoint-2", too_large, "MAKES"),
        "checkpoint": refusing("checkpoint-4", read_only, "MAKES"),
        "weights": refusing("weights/.saving/", full),
        "record": refusing("results.json", full),
        "answers": refusing("predictions.csv", full),
        "folder": refusing("folder", denied, "MAKES"),
        "no_locks": {"BROKEN_PATH": "no_locks", "BROKEN_FAT": "1"},
    }
    process = subprocess.run(
        [sys.executable, "-c", DISK, json.dumps(faults), *SAVING],
        env={**broken_disk.library(desk.parent), "HF_MPS_SIMULATE": "0", "HF_MPS_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    ended = json.loads(process.stdout)
    assert {name: (run["code"], run["line"]) for name, run in ended.items()} == snapshot(
        {
            "whole": (0, ""),
            "first": (
                1,
                "hf-mps: a file grew over the limit for one file: first/checkpoint-2; no checkpoint was written yet;"
                " next: ulimit -f unlimited, then hf-mps finetune my.yaml output_dir=first optimizations=false"
                " training.max_steps=4 training.save_strategy=steps training.save_steps=2"
                " training.load_best_model_at_end=false\n",
            ),
            "checkpoint": (
                1,
                "hf-mps: the disk is read-only: checkpoint/checkpoint-4; kept: checkpoint/checkpoint-2; next: make"
                " the disk writable, then hf-mps finetune my.yaml output_dir=checkpoint optimizations=false"
                " training.max_steps=4 training.save_strategy=steps training.save_steps=2"
                " training.load_best_model_at_end=false\n",
            ),
            "weights": (
                1,
                "hf-mps: no space is left on the disk; kept: weights/checkpoint-2, weights/checkpoint-4; next: make"
                " room, then hf-mps finetune my.yaml output_dir=weights optimizations=false training.max_steps=4"
                " training.save_strategy=steps training.save_steps=2 training.load_best_model_at_end=false\n",
            ),
            "record": (
                1,
                "hf-mps: no space is left on the disk; the trained model is in record; kept: record/checkpoint-2,"
                " record/checkpoint-4; next: make room, then hf-mps finetune my.yaml output_dir=record"
                " optimizations=false training.max_steps=4 training.save_strategy=steps training.save_steps=2"
                " training.load_best_model_at_end=false\n",
            ),
            "answers": (
                0,
                "hf-mps: predictions.csv is left out: no space is left on the disk; the model and results.json are"
                " there\n",
            ),
            "folder": (2, "hf-mps: output_dir folder: cannot be made: Permission denied; next: output_dir=~/folder\n"),
            "no_locks": (0, ""),
        }
    )
    assert {name: run["after"] for name, run in ended.items()} == dict.fromkeys(ended, 0)
    assert ended["first"]["left"] == []
    checkpoints = {name: [file for file in run["left"] if "checkpoint" in file] for name, run in ended.items()}
    assert checkpoints == snapshot(
        {
            "whole": ["checkpoint-2", "checkpoint-4"],
            "first": [],
            "checkpoint": ["checkpoint-2"],
            "weights": ["checkpoint-2", "checkpoint-4"],
            "record": ["checkpoint-2", "checkpoint-4"],
            "answers": ["checkpoint-2", "checkpoint-4"],
            "folder": [],
            "no_locks": ["checkpoint-2", "checkpoint-4"],
        }
    )
    whole = desk / "whole"
    for name in set(ended) - {"answers", "folder"}:
        run = desk / name
        assert {path.name for path in run.iterdir()} == {path.name for path in whole.iterdir()}, name
        assert (run / "predictions.csv").read_bytes() == (whole / "predictions.csv").read_bytes(), name


def test_a_file_system_without_renaming_over_a_file_keeps_the_old_one_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")

    def taken(self: Path, target: Path) -> Path:
        if target.exists():
            raise PermissionError(1, "Operation not permitted")
        return rename(self, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "replace", taken)
    replace_file(tmp_path / "new", tmp_path / "old")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("old", "new")]


LOCKING = """
import sys
from pathlib import Path
from hf_mps.finetune.run.run_dir import RunDir
with RunDir(Path("run"), "", named=True).lock():
    print("locked", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.process
def test_without_file_locks_a_second_run_is_refused_and_a_killed_one_is_not_in_the_way(desk: Path) -> None:
    environment = {**broken_disk.library(desk.parent), "BROKEN_PATH": str(desk), "BROKEN_FAT": "1"}
    command = [sys.executable, "-c", LOCKING]
    first = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "locked\n"
        second = subprocess.run(command, env=environment, input="", capture_output=True, text=True, check=False)
        assert second.stderr.splitlines()[-1].endswith(
            "output_dir run: a run is going on in it; next: --fresh, which trains beside it in run-2"
        )
    finally:
        first.kill()
        first.communicate()
    third = subprocess.run(command, env=environment, input="", capture_output=True, text=True, check=False)
    assert third.stdout == "locked\n", third.stderr


def test_a_clock_that_went_back_does_not_remove_the_newest_checkpoint(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def an_hour_ahead(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        for checkpoint in (desk / "runs/my").glob("checkpoint-*"):
            os.utime(checkpoint, (ahead, ahead))

    ahead = (desk / "my.yaml").stat().st_mtime + 3600
    monkeypatch.setattr(callbacks.OwnDraws, "on_step_begin", an_hour_ahead, raising=False)
    words = ("my.yaml", *SAVING, "training.save_total_limit=1")
    with monkeypatch.context() as patch:
        patch.setattr("hf_mps.layer.guards.resume.checkpoints._date_last", lambda target: None)
        assert finetune(*words, "output_dir=runs/my").code == 0
        assert [path.name for path in (desk / "runs/my").glob("checkpoint-*")] == ["checkpoint-2"]
    assert finetune(*words, "--fresh", "output_dir=runs/new").code == 0
    assert [path.name for path in (desk / "runs/new").glob("checkpoint-*")] == ["checkpoint-6"]


def test_a_run_in_a_folder_in_use_is_refused_in_one_line_before_anything_is_read(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["my.yaml", *SAVING]
    second: list[Any] = []

    def starts(self: Any, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            with monkeypatch.context() as patch:
                patch.setattr(stages, "prepare_run", pytest.fail)
                capfd.readouterr()
                second.extend((main(["finetune", *words]), capfd.readouterr().err))

    monkeypatch.setattr(callbacks.OwnDraws, "on_step_begin", starts, raising=False)
    assert finetune(*words).code == 0
    assert second == snapshot(
        [2, "hf-mps: output_dir runs/my: a run is going on in it; next: --fresh, which trains beside it in runs/my-2\n"]
    )


def test_a_run_that_ends_while_a_second_one_loads_is_not_trained_over(
    desk: Path, finetune: Command, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("my.yaml", *SAVING, "training.save_total_limit=1")
    stop(3)
    assert finetune(*words).code == 130
    stock = stages.prepare_run

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(stages, "prepare_run", stock)
        assert main(["finetune", *words]) == 0
        return stock(*given)

    monkeypatch.setattr(stages, "prepare_run", overtaken)
    ended = finetune(*words)
    told = "hf-mps: runs/my: another run has written into it meanwhile; next: the same command again\n"
    assert (ended.code, ended.err) == (2, told)
    ended = finetune(*words)
    assert ended.code == 0
    assert "runs/my holds this recipe's finished run" in ended.out


def test_ctrl_c_twice_in_a_slow_save_leaves_the_checkpoint_before_and_the_command_goes_on(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Trainer._save_optimizer_and_scheduler

    def slow(self: Any, folder: Any) -> None:
        stock(self, folder)
        if self.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_save_optimizer_and_scheduler", slow)
        ended = finetune("my.yaml", *SAVING)
    assert ended.code == 130
    assert ended.err.splitlines()[-1] == snapshot(
        "hf-mps: interrupted; kept: runs/my/checkpoint-2; to go on: hf-mps finetune my.yaml"
        " training.save_strategy=steps training.save_steps=2 training.load_best_model_at_end=false"
    )
    assert sorted(path.name for path in (desk / "runs/my").iterdir()) == ["checkpoint-2", "data.json", "recipe.yaml"]
    assert main(next_command(ended)) == 0


TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, which may have started the suite, ignores it
terminal = os.open(sys.argv[1], os.O_RDWR)  # the first that a session opens is its own
for shown in (0, 1, 2):
    os.dup2(terminal, shown)
from hf_mps.cli.main import main
sys.exit(main(["finetune", "my.yaml", *sys.argv[2:]]))
"""


@pytest.mark.process
def test_a_closed_terminal_ends_the_run_with_a_checkpoint(desk: Path) -> None:
    ours, theirs = pty.openpty()
    words = [os.ttyname(theirs), "training.save_strategy=steps", "training.save_steps=1000", "training.max_steps=9999"]
    run = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, *words],
        env={**os.environ, "HF_MPS_SIMULATE": "0", "HF_MPS_DEVICE": "cpu", "XDG_CACHE_HOME": str(desk / "cache")},
        start_new_session=True,
        # Under nohup the suite ignores SIGHUP, and what it starts would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        shown = b""
        while not re.search(rb" [1-9]\d*/9999", shown):  # a first step
            assert select.select([ours], [], [], 60)[0]
            shown += os.read(ours, 1000)
        os.close(theirs)
        os.close(ours)
        assert run.wait(50) == 128 + signal.SIGHUP
    finally:
        run.kill()
        run.wait()
    (checkpoint,) = (desk / "runs/my").glob("checkpoint-*")
    assert int(re.sub(r"\D", "", checkpoint.name)) < 1000


def too_large(monkeypatch: pytest.MonkeyPatch, method: str, step: int) -> None:
    """Let a Trainer's method ask the device, in that step, for more memory than it has."""
    stock = getattr(Trainer, method)

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == step:
            monkeypatch.setattr(Trainer, method, stock)
            torch.empty(2**40, dtype=torch.uint8, device="mps")
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, method, called)


def test_too_little_memory_for_a_step_ends_the_run_with_a_command_that_takes_less(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    too_large(monkeypatch, "training_step", 8)
    ended = finetune("my.yaml", "training.num_train_epochs=2")
    assert (ended.code, ended.err) == (
        1,
        snapshot(
            "hf-mps: out of memory: Invalid buffer size: 1024.00 GiB; kept: runs/my/checkpoint-6; next: hf-mps"
            " finetune my.yaml training.num_train_epochs=2 --fresh training.per_device_train_batch_size=4"
            " training.gradient_accumulation_steps=2\n"
        ),
    )
    assert main(next_command(ended)) == 0


def test_the_command_that_takes_less_halves_the_tasks_own_batch(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = Task.__init__

    def begun(self: Task, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.arguments_defaults = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}

    monkeypatch.setattr(Task, "__init__", begun)
    recipe = (desk / "my.yaml").read_text(encoding="utf-8")
    (desk / "my.yaml").write_text(recipe.replace("  per_device_train_batch_size: 8\n", ""), encoding="utf-8")
    too_large(monkeypatch, "training_step", 2)
    ended = finetune("my.yaml")
    assert ended.code == 1
    assert ended.err.endswith(
        "next: hf-mps finetune my.yaml --fresh training.per_device_train_batch_size=2"
        " training.gradient_accumulation_steps=6\n"
    )


def test_too_little_memory_for_an_evaluation_loses_no_step_and_a_smaller_batch_goes_on(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = ("training.load_best_model_at_end=true", "training.metric_for_best_model=eval_loss")
    words = ("my.yaml", "training.num_train_epochs=2", *best)
    too_large(monkeypatch, "prediction_step", 12)
    ended = finetune(*words, "training.per_device_eval_batch_size=16")
    assert (ended.code, ended.err) == (
        1,
        snapshot(
            "hf-mps: out of memory: Invalid buffer size: 1024.00 GiB; kept: runs/my/checkpoint-6,"
            " runs/my/checkpoint-12; next: hf-mps finetune my.yaml training.num_train_epochs=2"
            " training.load_best_model_at_end=true training.metric_for_best_model=eval_loss"
            " training.per_device_eval_batch_size=8\n"
        ),
    )
    assert main(next_command(ended)) == 0
    assert finetune(*words, "training.per_device_eval_batch_size=8", "output_dir=whole").code == 0
    for file in ("model.safetensors", "predictions.csv"):
        assert (desk / "runs/my" / file).read_bytes() == (desk / "whole" / file).read_bytes()
