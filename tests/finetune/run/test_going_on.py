"""A run that is gone on with ends as the unbroken one: at its last step, with all of its time, on the same rows."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from inline_snapshot import snapshot

from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.run import callbacks, run_dir, stages
from tests.finetune import tiny
from tests.finetune.run.test_exact_resume import left
from tests.finetune.run_files import results
from tests.finetune.tiny import Command, Stop


@pytest.fixture
def stop_after_training(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """End the next run between its last checkpoint and its results, as a kill there does."""
    measured = stages._measured

    def once(trainer: Any) -> dict[str, float]:
        monkeypatch.setattr(stages, "_measured", measured)
        raise KeyboardInterrupt

    return lambda: monkeypatch.setattr(stages, "_measured", once)


# Six batches are an epoch: step 8 stands within the second, and so does the last of one and a half epochs.
@pytest.mark.rotated
@pytest.mark.parametrize("ends", ["training.max_steps=8", "training.num_train_epochs=1.5"])
def test_a_run_stopped_behind_its_last_checkpoint_takes_no_step_more(
    desk: Path, finetune: Command, stop_after_training: Callable[[], None], ends: str
) -> None:
    words = ("my.yaml", ends, "training.logging_steps=1")
    assert finetune(*words, "output_dir=whole").code == 0
    stop_after_training()
    assert finetune(*words).code == 130
    ended = finetune(*words).finished()
    assert "this recipe's run goes on from checkpoint-" in ended.out
    assert left(desk / "runs/my") == left(desk / "whole")
    steps = [entry["step"] for entry in results(desk / "runs/my")["log_history"]]
    assert max(steps) == (8 if "max_steps" in ends else 9)


def test_a_run_stopped_in_its_last_step_is_over(desk: Path, finetune: Command, stop: Stop) -> None:
    assert finetune("my.yaml", "training.max_steps=8", "output_dir=whole").code == 0
    stop(8)
    assert finetune("my.yaml", "training.max_steps=8").code == 130
    finetune("my.yaml", "training.max_steps=8").finished()
    assert left(desk / "runs/my") == left(desk / "whole")


def test_a_run_goes_on_with_the_patience_that_it_had_left(
    desk: Path, finetune: Command, stop: Stop, stop_after_training: Callable[[], None]
) -> None:
    # Nothing is learned: no evaluation is better than the first, and the third is one too many.
    words = ("my.yaml", "early_stopping_patience=2", "training.num_train_epochs=9", "training.learning_rate=0")
    stop(14)
    assert finetune(*words).code == 130
    stop_after_training()
    assert finetune(*words).code == 130
    assert finetune(*words).code == 0
    evaluated = [entry["step"] for entry in results(desk / "runs/my")["log_history"] if "eval_f1" in entry]
    assert evaluated == [6, 12, 18]


@pytest.mark.rotated
@pytest.mark.parametrize("where", ["the last step of an epoch", "its evaluation"])
def test_a_stop_leaves_out_no_evaluation_that_tells_the_best_weights(
    desk: Path, finetune: Command, stop: Stop, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    words = ("my.yaml", "training.load_best_model_at_end=true", "training.num_train_epochs=2")
    assert finetune(*words, "output_dir=whole").code == 0
    if where == "its evaluation":
        tiny.interrupt_evaluation(monkeypatch)
    else:
        stop(6)
    ended = finetune(*words)
    assert ended.code == 130
    assert "hf-mps: stopping after this evaluation, which tells the best weights" in ended.err
    assert "interrupted at step 6; kept: runs/my/checkpoint-6;" in ended.err
    assert finetune(*words).code == 0
    assert left(desk / "runs/my") == left(desk / "whole")
    assert results(desk / "whole")["choices"]["kept_model"] == {"value": "best by f1", "reason": "the recipe says so"}


def test_the_time_of_every_part_counts(
    desk: Path, finetune: Command, stop: Stop, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """A second passes whenever somebody looks."""

        now = 0.0

        def perf_counter(self) -> float:
            self.now += 1.0
            return self.now

    monkeypatch.setattr(callbacks, "time", Clock())
    words = ("my.yaml", "training.num_train_epochs=2")
    assert finetune(*words, "output_dir=whole").code == 0
    stop(4)
    assert finetune(*words).code == 130
    stop(9)
    assert finetune(*words).code == 130
    assert finetune(*words).code == 0
    whole, parts = results(desk / "whole"), results(desk / "runs/my")
    assert (whole["train_seconds"], parts["train_seconds"]) == (14, 14)  # 12 steps and the ends of 2 epochs
    assert parts["samples_per_second"] == whole["samples_per_second"] == pytest.approx(96 / 14, abs=0.1)
    assert "Training took 14" in (desk / "runs/my/README.md").read_text(encoding="utf-8")


def without_a_row(path: Path) -> None:
    """The file with its last row gone."""
    path.write_text("".join(path.read_text(encoding="utf-8").splitlines(keepends=True)[:-1]), encoding="utf-8")


def test_a_run_is_not_gone_on_with_on_other_rows(desk: Path, finetune: Command, stop: Stop) -> None:
    stop(4)
    assert finetune("my.yaml").code == 130
    whole = (desk / "train.csv").read_text(encoding="utf-8")
    without_a_row(desk / "train.csv")
    text = (desk / "dev.csv").read_text(encoding="utf-8")
    (desk / "dev.csv").write_text(text.replace("mat", "map", 1), encoding="utf-8")
    line = (
        "hf-mps: runs/my holds an unfinished run on other rows: train (48 rows then, 47 now), validation (other"
        " content); next: the rows as they were, or --fresh, which trains beside it in runs/my-2\n"
    )
    for more in ((), ("--plan",)):
        ended = finetune("my.yaml", *more)
        assert (ended.code, ended.err) == (2, line)
    assert {path.name for path in (desk / "runs/my").iterdir()} == {"checkpoint-4", "recipe.yaml", "data.json"}

    # The same rows in other clothes are the same rows: another time of writing, another column that nobody reads.
    rows = whole.splitlines()
    more_columns = [f"{rows[0]},note", *(f"{row},{number}" for number, row in enumerate(rows[1:]))]
    (desk / "train.csv").write_text("\n".join(more_columns) + "\n", encoding="utf-8")
    (desk / "dev.csv").write_text(text, encoding="utf-8")
    ended = finetune("my.yaml").finished()
    assert "this recipe's run goes on from checkpoint-4" in ended.out


def test_a_run_of_an_earlier_release_is_gone_on_with(desk: Path, finetune: Command, stop: Stop) -> None:
    """It has no digests of its rows, and its checkpoint no clock."""
    stop(4)
    assert finetune("my.yaml").code == 130
    (desk / "runs/my/data.json").unlink()
    file = desk / "runs/my/checkpoint-4/trainer_state.json"
    state = json.loads(file.read_text(encoding="utf-8"))
    del state["stateful_callbacks"]["Stopwatch"]
    file.write_text(json.dumps(state), encoding="utf-8")
    ended = finetune("my.yaml").finished()
    assert "this recipe's run goes on from checkpoint-4" in ended.out
    assert (desk / "runs/my/data.json").is_file()
    assert results(desk / "runs/my")["samples_per_second"] > 0


def test_a_finished_run_on_other_rows_is_another_run(desk: Path, finetune: Command) -> None:
    words = ("my.yaml", "training.max_steps=1")
    assert finetune(*words).code == 0
    assert finetune(*words).out.startswith("runs/my holds this recipe's finished run")
    without_a_row(desk / "train.csv")
    assert finetune(*words, "output_dir=runs/my").refused() == snapshot(
        "runs/my holds a finished run of a recipe that has changed since: data.files.train has other content;"
        " next: the recipe as it was, or --fresh, which trains beside it in runs/my-2"
    )
    ended = finetune(*words).finished()
    assert "runs/my holds another run, which stays as it is" in ended.out
    assert (desk / "runs/my-2/results.json").is_file()


def test_images_are_told_by_what_is_in_them(tmp_path: Path) -> None:

    def digest(*names: str) -> str:
        dataset = Dataset.from_dict({"image": list(names), "label": ["a"] * len(names)})
        return str(run_dir.digest_rows({"train": Rows(dataset, "here", folder=tmp_path)})["train"]["digest"])

    for name, content in (("1.png", b"one"), ("2.png", b"two"), ("moved.png", b"one")):
        (tmp_path / name).write_bytes(content)
    before = digest("1.png", "2.png")
    assert digest("moved.png", "2.png") == before
    assert digest("2.png", "1.png") != before
    (tmp_path / "2.png").write_bytes(b"another")
    assert digest("1.png", "2.png") != before


def test_rows_without_images_between_others_have_a_digest(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"one")
    rows = [
        Rows(Dataset.from_list([{"images": ["1.png"]}, {"images": none}]), "a", folder=tmp_path) for none in ([], None)
    ]
    assert run_dir.digest_rows({"a": rows[0]}) == run_dir.digest_rows({"a": rows[1]})


def test_bytes_and_nested_columns_have_a_digest(tmp_path: Path) -> None:

    rows = [
        {
            "image": {"bytes": b"\x00\xff", "path": None},
            "messages": [{"role": "user", "content": "a"}],
            "n": float("nan"),
        },
        {"image": {"bytes": b"", "path": None}, "messages": [], "n": 1.0},
    ]
    days = [datetime.date(2026, 1, 1), None]
    digests = set()
    for day in (days, days[::-1]):
        dataset = Dataset.from_list(rows).add_column("day", day)
        picked = Rows(dataset, "here").sample([1, 0]).sample([1, 0])  # through an index and back
        assert run_dir.digest_rows({"a": Rows(dataset, "here")}) == run_dir.digest_rows({"a": picked})
        digests.add(run_dir.digest_rows({"a": picked})["a"]["digest"])
    assert len(digests) == 2
