"""A run that was stopped goes on from where it was, ends as an unbroken one, and never in another's folder."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from inline_snapshot import snapshot
from torch.utils.data import DataLoader

from hf_mps.finetune.recipe.resolve import load_recipe
from hf_mps.finetune.run import interrupt, run_dir
from hf_mps.finetune.run.interrupt import Interruption
from hf_mps.finetune.run.run_dir import RunDir
from tests.finetune import tiny
from tests.finetune.run.test_exact_resume import left
from tests.finetune.run_files import results
from tests.finetune.tiny import Command, Stop
from tests.snapshots import masked


@pytest.mark.rotated
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_run_saves_a_checkpoint_and_goes_on_to_the_same_end(
    desk: Path, finetune: Command, stop: Stop, number: int, code: int
) -> None:
    words = ("my.yaml", "training.num_train_epochs=2", "training.logging_steps=1")
    assert finetune(*words, "output_dir=whole").code == 0
    stop(4, number)
    ended = finetune(*words)
    assert ended.code == code
    told = [line for line in ended.err.splitlines() if line.startswith("hf-mps: interrupted")]
    assert told == snapshot(
        [
            "hf-mps: interrupted at step 4; kept: runs/my/checkpoint-4; to go on: hf-mps finetune my.yaml"
            " training.num_train_epochs=2 training.logging_steps=1"
        ]
    )
    run = desk / "runs" / "my"
    assert {path.name for path in run.iterdir()} == {"checkpoint-4", "recipe.yaml", "data.json"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    ended = finetune(*words).finished()
    assert "this recipe's run goes on from checkpoint-4" in ended.out
    assert left(run) == left(desk / "whole")
    assert not (desk / "runs" / "my-2").exists()


def test_the_checkpoint_of_a_stop_displaces_none_that_is_due(desk: Path, finetune: Command, stop: Stop) -> None:
    def kept(run: Path) -> list[str]:
        return sorted(path.name for path in run.glob("checkpoint-*"))

    words = ("my.yaml", "training.num_train_epochs=2", "training.save_strategy=steps", "training.save_steps=3")
    assert finetune(*words, "output_dir=whole").code == 0
    stop(10)
    assert finetune(*words).code == 130
    assert kept(desk / "runs/my") == ["checkpoint-10", "checkpoint-6", "checkpoint-9"]
    assert finetune(*words).code == 0
    assert kept(desk / "runs/my") == kept(desk / "whole") == ["checkpoint-12", "checkpoint-9"]


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("further", "step"),
    [
        (("training.eval_strategy=epoch",), 6),
        (("training.eval_strategy=steps", "training.eval_steps=4"), 4),
        (("training.eval_strategy=steps", "training.eval_steps=7", "training.max_steps=5"), 5),
    ],
)
def test_the_log_of_a_run_stopped_during_an_evaluation_is_the_unbroken_ones(
    desk: Path, finetune: Command, monkeypatch: pytest.MonkeyPatch, further: tuple[str, ...], step: int
) -> None:
    """With the evaluation behind its first epoch, at step 4, or at its last step; the loss is that of dropout too."""
    words = ("my.yaml", "training.num_train_epochs=2", "training.logging_steps=1", *further)
    assert finetune(*words, "output_dir=whole").code == 0
    tiny.interrupt_evaluation(monkeypatch)
    stopped = finetune(*words)
    assert (stopped.code, f"checkpoint-{step};" in stopped.err) == (130, True)
    assert finetune(*words).code == 0
    assert left(desk / "runs/my") == left(desk / "whole")


def test_a_handler_of_the_users_own_is_left_alone() -> None:
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        with Interruption():
            assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_loaders_worker_outlives_a_signal_to_the_whole_group(tmp_path: Path) -> None:

    rows: Any = range(40)
    loader: Any = DataLoader(rows, num_workers=1, worker_init_fn=lambda worker: (tmp_path / str(worker)).touch())
    interrupt.outlive(loader)
    batches: Any = iter(loader)
    next(batches)  # the worker has begun
    assert (tmp_path / "0").exists(), "what the program wants of a worker is done"
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(batches._workers[0].pid, number)
    assert len(list(batches)) == 39


def test_a_finished_run_is_told_of_and_not_repeated(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml").code == 0
    written = {path: path.stat().st_mtime_ns for path in (desk / "runs/my").rglob("*")}
    score = results(desk / "runs/my")["metrics"]["f1"]
    ended = finetune("my.yaml")
    assert ended == (
        0,
        f"runs/my holds this recipe's finished run (f1 {score:.4f}); to train again beside it:"
        " hf-mps finetune my.yaml --fresh\n",
        "",
    )
    assert {path: path.stat().st_mtime_ns for path in (desk / "runs/my").rglob("*")} == written
    # Another recipe's run goes beside it.
    ended = finetune("my.yaml", "seed=9")
    assert "runs/my holds another run, which stays as it is" in ended.out
    assert (desk / "runs/my-2/results.json").is_file()
    assert finetune("my.yaml", "seed=9").out.startswith("runs/my-2 holds this recipe's finished run")


@pytest.mark.parametrize("named", [(), ("output_dir=runs/my",)])
def test_an_unfinished_run_of_a_changed_recipe_is_refused_with_the_difference(
    desk: Path, finetune: Command, stop: Stop, named: tuple[str, ...]
) -> None:
    stop(2, signal.SIGINT)
    assert finetune("my.yaml", *named).code == 130
    assert finetune("my.yaml", "training.learning_rate=1e-3", "max_length=16", *named).refused() == snapshot(
        "runs/my holds an unfinished run of a recipe that has changed since: training.learning_rate 0.005 →"
        " 0.001, max_length not given → 16; next: the recipe as it was, or --fresh, which trains beside it in"
        " runs/my-2"
    )
    assert finetune("my.yaml", "training.learning_rate=1e-3", "--fresh", *named).code == 0
    assert (desk / "runs/my-2/results.json").is_file()
    assert {path.name for path in (desk / "runs/my").iterdir()} == {"checkpoint-2", "recipe.yaml", "data.json"}


def test_the_stored_recipe_runs_by_itself(desk: Path, finetune: Command) -> None:
    assert finetune("my.yaml", "seed=5").code == 0
    stored = desk / "runs/my/recipe.yaml"
    assert stored.read_text(encoding="utf-8").startswith(
        "# The recipe of this run, as it was given: hf-mps finetune my.yaml seed=5\n"
    )
    assert load_recipe(str(stored)).recipe.seed == 5
    finetune(str(stored)).finished()
    metrics = [results(desk / f"runs/{name}")["metrics"] for name in ("my", "recipe")]
    assert metrics[0] == metrics[1]


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(desk: Path, finetune: Command) -> None:
    run = desk / "runs/my"
    (run / ".saving").mkdir(parents=True)
    (run / ".saving" / "half").write_text("x", encoding="utf-8")
    run_dir.store(run, load_recipe("my.yaml"), {})
    ended = finetune("my.yaml").finished()
    assert "this recipe's run left no checkpoint and begins again" in ended.out
    assert not list(run.glob(".*"))
    assert run_dir.checkpoints(run)


def test_a_torn_checkpoint_is_named_where_a_run_goes_on_from_the_one_before(desk: Path) -> None:
    run = desk / "runs/my"
    for step in (2, 4):
        (run / f"checkpoint-{step}").mkdir(parents=True)
        (run / f"checkpoint-{step}" / run_dir.STATE).write_text("{}", encoding="utf-8")
        (run / f"checkpoint-{step}" / "pytorch_model.bin").write_bytes(b"weights")
    resolved = load_recipe("my.yaml")
    run_dir.store(run, resolved, {})
    assert RunDir.choose(resolved).reason == snapshot("this recipe's run goes on from checkpoint-4")
    (run / "checkpoint-4" / "optimizer.pt").write_text("", encoding="utf-8")
    place = RunDir.choose(resolved)
    assert place.checkpoint == Path("runs/my/checkpoint-2")
    torn = "checkpoint-4 is torn (optimizer.pt: it is empty)"
    assert masked(place.reason, torn=torn) == snapshot("this recipe's run goes on from checkpoint-2: <torn>")
    (run / "checkpoint-2" / run_dir.STATE).unlink()
    assert masked(RunDir.choose(resolved).reason, torn=torn) == snapshot(
        "this recipe's run left no checkpoint and begins again: <torn>; checkpoint-2 is torn"
        " (trainer_state.json is missing)"
    )


def test_two_runs_that_start_together_take_two_folders(desk: Path) -> None:
    resolved = load_recipe("my.yaml")
    first, second = RunDir.choose(resolved), RunDir.choose(resolved)
    assert first == second
    with first.lock() as one, second.lock() as other:
        assert (one.path, other.path) == (Path("runs/my"), Path("runs/my-2"))


def test_a_thread_other_than_the_main_one_sets_no_handler() -> None:
    seen: list[Any] = []

    def inside() -> None:
        with Interruption():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
