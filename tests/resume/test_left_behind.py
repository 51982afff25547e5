"""What a killed process leaves: hidden files are swept, and a checkpoint that was being removed is none any more."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import trainer_utils

from hf_mps.core import checkpoint_files
from hf_mps.core.checkpoint_files import torn

STATE = "trainer_state.json"


@pytest.fixture
def dead() -> int:
    """The number of a process that there is not."""
    return next(number for number in range(2**22 - 1, 2**22 - 1000, -1) if not psutil.pid_exists(number))


def checkpoint(folder: Path) -> Path:
    """A checkpoint with a file of each kind."""
    folder.mkdir(parents=True)
    for name in ("config.json", STATE):
        (folder / name).write_text("{}", encoding="utf-8")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state_0.pth", "loader_rng.pth", "training_args.bin"):
        (folder / name).write_bytes(b"old")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_a_file_that_a_killed_process_was_writing_is_swept(tmp_path: Path, dead: int) -> None:
    left, alive = (tmp_path / f".results.json.{number}-0123abcd.tmp" for number in (dead, os.getppid()))
    for file in (left, alive, tmp_path / ".mine.tmp"):
        file.touch()
    checkpoint_files.sweep(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {alive.name, ".mine.tmp"}


def test_a_checkpoint_without_weights_is_torn(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "checkpoint-1")
    assert torn(whole, STATE) is None
    (whole / "model.safetensors").rename(whole / "weights.npz")
    assert torn(whole, STATE) is None, "a Trainer of the user's own may save weights in a form of its own"
    (whole / "weights.npz").unlink()
    assert torn(whole, STATE) == "its weights are missing"


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_none_of_its_name(
    tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2, 3):
        checkpoint(tmp_path / f"checkpoint-{number}")
    seen: list[list[str]] = []

    def killed(folder: Any, **_: Any) -> Iterator[None]:
        (Path(folder) / "model.safetensors").unlink()
        seen.append(sorted(path.name for path in tmp_path.glob("checkpoint-*")))
        raise KeyboardInterrupt

    stock = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt), checkpoint_files.removed_whole():
        trainer_utils.rotate_checkpoints(output_dir=str(tmp_path), save_total_limit=2)
    monkeypatch.setattr(shutil, "rmtree", stock)
    assert seen == [["checkpoint-2", "checkpoint-3"]]
    (hidden,) = tmp_path.glob(".checkpoint-1.removed-*")
    hidden.rename(tmp_path / f".checkpoint-1.removed-{dead}")
    checkpoint_files.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_several_ranks_may_sweep_at_once(tmp_path: Path, dead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    aside = checkpoint(tmp_path / f".checkpoint-1.replaced-{dead}")
    stock = Path.rename

    def faster(path: Path, target: Path) -> Path:
        stock(path, target)
        return stock(path, target)  # as it is for a rank that asks a moment later

    monkeypatch.setattr(Path, "rename", faster)
    checkpoint_files.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert not aside.exists()
