"""Which checkpoints are known as torn, what is taken in their place, and what is left where writing is broken off."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.trainer
from inline_snapshot import snapshot
from safetensors.torch import save_file
from torch.distributed import checkpoint
from transformers import TrainerCallback
from transformers.trainer_utils import HubStrategy, get_last_checkpoint

from hf_mps.core import checkpoint_files, notices
from hf_mps.core.errors import UserError
from hf_mps.layer import guards
from hf_mps.layer.guards import GuardNotice
from hf_mps.layer.guards.resume.checkpoints import ACCELERATE_LAST, TRAINER_LAST
from tests.layer.guards import loops
from tests.snapshots import masked


@pytest.fixture(autouse=True)
def _anew() -> Any:
    """Every line can be said again."""
    notices.forget()
    for name in ("torn-checkpoint", "atomic-checkpoint", "resume-loss"):
        guards.get(name).forget()


def whole(folder: Path) -> Path:
    """A checkpoint with one file of each kind."""
    folder.mkdir(parents=True)
    save_file({"a": torch.ones(64), "b": torch.zeros(3, dtype=torch.long)}, folder / "model-1.safetensors")
    torch.save({"a": torch.ones(64)}, folder / "optimizer.pt")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    (folder / "notes.txt").write_text("of the user's")
    (folder / TRAINER_LAST).write_text(json.dumps({"global_step": 1}))
    return folder


def cut(file: Path, left: int) -> None:
    """Leave the first bytes of a file."""
    file.write_bytes(file.read_bytes()[:left])


def names(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(each.name for each in folder.iterdir())


def test_a_whole_one_is_whole(tmp_path: Path) -> None:
    assert checkpoint_files.torn(whole(tmp_path / "checkpoint-1"), TRAINER_LAST) is None


@pytest.mark.parametrize(
    ("file", "left", "wrong"),
    [
        ("model-1.safetensors", 300, "model-1.safetensors: it ends after 300 of 400 bytes"),
        ("model-1.safetensors", 30, "model-1.safetensors: it ends after 30 bytes, in its header"),
        ("model-1.safetensors", 0, "model-1.safetensors: it ends after 0 bytes, in its header"),
        ("optimizer.pt", 500, "optimizer.pt: its end is missing"),
        ("optimizer.pt", 0, "optimizer.pt: it is empty"),
        (TRAINER_LAST, 10, "trainer_state.json: it cannot be read (Unterminated string"),
    ],
)
def test_a_file_that_ends_early_is_named(file: str, left: int, wrong: str, tmp_path: Path) -> None:
    folder = whole(tmp_path / "checkpoint-1")
    cut(folder / file, left)
    assert (checkpoint_files.torn(folder, TRAINER_LAST) or "").startswith(wrong)


def test_a_shard_or_the_last_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = whole(tmp_path / "checkpoint-1")
    (folder / "model-1.safetensors").unlink()
    assert checkpoint_files.torn(folder, TRAINER_LAST) == snapshot(
        "model.safetensors.index.json: model-1.safetensors is missing"
    )
    (folder / TRAINER_LAST).unlink()
    assert checkpoint_files.torn(folder, TRAINER_LAST) == "trainer_state.json is missing"
    assert checkpoint_files.torn(folder, ACCELERATE_LAST) == "random_states_0.pkl is missing"


def test_the_parts_of_several_ranks_without_their_index_are_named(tmp_path: Path) -> None:
    folder = whole(tmp_path / "checkpoint-1")
    checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=folder / "pytorch_model_fsdp_0", no_dist=True)
    assert checkpoint_files.torn(folder, TRAINER_LAST) is None
    (folder / "pytorch_model_fsdp_0/.metadata").unlink()
    assert checkpoint_files.torn(folder, TRAINER_LAST) == "pytorch_model_fsdp_0: .metadata is missing"


def test_the_last_whole_checkpoint_is_taken_and_one_line_says_so(tmp_path: Path) -> None:
    for step in (9, 10, 100, 110):
        whole(tmp_path / f"checkpoint-{step}")
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-110")
    cut(tmp_path / "checkpoint-110" / "optimizer.pt", 500)
    (tmp_path / "checkpoint-100" / TRAINER_LAST).unlink()
    with pytest.warns(GuardNotice) as said:
        assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    (line,) = [str(each.message) for each in said]
    torn = f"{tmp_path}/checkpoint-110 is torn (optimizer.pt: its end is missing)"
    assert line.startswith(f"hf_mps: {torn}: the one before is taken, checkpoint-10 (torn-checkpoint: https://")
    with guards.suspended("torn-checkpoint"):
        assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-110")


def test_where_none_is_whole_none_is_taken(tmp_path: Path) -> None:
    cut(whole(tmp_path / "checkpoint-1") / "optimizer.pt", 500)
    with pytest.warns(GuardNotice, match="and none before it is whole"):
        assert get_last_checkpoint(str(tmp_path)) is None


def test_a_torn_folder_that_the_user_named_is_refused_with_the_one_to_take(tmp_path: Path) -> None:
    run = loops.trainer(tmp_path, save_strategy="steps", save_steps=2)
    run.train()
    cut(tmp_path / "checkpoint-4" / "optimizer.pt", 1000)
    with pytest.raises(UserError) as refusal:
        loops.trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert masked(str(refusal.value), folder=tmp_path) == snapshot(
        "resume_from_checkpoint: <folder>/checkpoint-4 is torn (optimizer.pt: its end is missing); next:"
        " resume_from_checkpoint=<folder>/checkpoint-2"
    )
    run = loops.trainer(tmp_path)
    with pytest.warns(GuardNotice, match="the one before is taken, checkpoint-2"):
        run.train(resume_from_checkpoint=True)
    assert run.state.global_step == 4


def weights_saved(folder: Path) -> Any:
    """A model's folder, as save_pretrained writes it; the model is another one than `loops.bert`."""
    model = loops.bert()
    with torch.no_grad():
        model.classifier.weight.add_(1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("init", [False, True], ids=["model", "model_init"])
def test_a_model_s_folder_is_no_torn_checkpoint_and_its_weights_are_trained(init: bool, tmp_path: Path) -> None:
    expected = weights_saved(tmp_path / "my-model").classifier.weight
    run = loops.trainer(tmp_path / "run", learning_rate=0.0)
    if init:
        run.model_init = lambda: loops.bert()
    with pytest.warns(GuardNotice, match=r"my-model holds a model and no trainer_state.json: .* step 0 with its weigh"):
        run.train(resume_from_checkpoint=str(tmp_path / "my-model"))
    assert run.state.global_step == 4
    assert torch.equal(run.model.classifier.weight.detach().cpu(), expected)


def test_stock_ends_there_after_it_has_loaded_them(tmp_path: Path) -> None:
    expected = weights_saved(tmp_path / "my-model").classifier.weight
    run = loops.trainer(tmp_path / "run")
    with guards.suspended("torn-checkpoint"), pytest.raises(FileNotFoundError, match=TRAINER_LAST):
        run.train(resume_from_checkpoint=str(tmp_path / "my-model"))
    assert torch.equal(run.model.classifier.weight.detach().cpu(), expected)


def test_only_what_is_torn_is_called_torn(tmp_path: Path) -> None:
    weights_saved(tmp_path / "my-model")
    assert checkpoint_files.model_alone(tmp_path / "my-model")
    shutil.copytree(tmp_path / "my-model", tmp_path / "checkpoint-7")  # a checkpoint's first half looks so
    assert not checkpoint_files.model_alone(tmp_path / "checkpoint-7")
    with pytest.raises(UserError, match=r"checkpoint-7 is torn \(trainer_state.json is missing\)"):
        loops.trainer(tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    cut(tmp_path / "my-model" / "model.safetensors", 2000)
    with pytest.raises(UserError, match=r"my-model is torn \(model.safetensors: it ends after 2,000"):
        loops.trainer(tmp_path / "run").train(resume_from_checkpoint=str(tmp_path / "my-model"))
    assert not checkpoint_files.model_alone(whole(tmp_path / "by-another-name"))
    (tmp_path / "adapter").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "adapter" / "adapter_model.safetensors")
    assert checkpoint_files.model_alone(tmp_path / "adapter")


def saved(accelerator: Any, folder: Path) -> Any:
    """A model whose state was saved twice."""
    model = accelerator.prepare_model(torch.nn.Linear(2, 2))
    for step in (1, 2):
        model.weight.data.fill_(step)
        assert accelerator.save_state(str(folder / f"step_{step}")) == folder / f"step_{step}"
    return model


def test_a_torn_state_of_an_accelerator_is_refused(tmp_path: Path) -> None:
    accelerator = loops.new_accelerator()
    model = saved(accelerator, tmp_path)
    cut(tmp_path / "step_2" / "model.safetensors", 100)
    with pytest.raises(UserError, match=rf"step_2 is torn .*; next: load_state={tmp_path}/step_1$"):
        accelerator.load_state(str(tmp_path / "step_2"))
    accelerator.load_state(str(tmp_path / "step_1"))
    assert model.weight.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_of_numbered_states_the_one_before_is_taken_and_the_limit_is_kept(tmp_path: Path) -> None:
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = loops.new_accelerator(project_config=project)
    model = accelerator.prepare_model(torch.nn.Linear(2, 2))
    for step in range(4):
        model.weight.data.fill_(step)
        assert accelerator.save_state() == tmp_path / "checkpoints" / f"checkpoint_{step}"
    assert names(tmp_path / "checkpoints") == ["checkpoint_2", "checkpoint_3"]
    assert names(tmp_path) == ["checkpoints"]
    cut(tmp_path / "checkpoints" / "checkpoint_3" / "model.safetensors", 100)
    with pytest.warns(GuardNotice, match="checkpoint_3 is torn .* the one before is taken, checkpoint_2"):
        accelerator.load_state()
    assert model.weight.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    project.iteration = 3
    with pytest.raises(ValueError, match="already exists"):
        accelerator.save_state()


def test_a_state_saved_into_a_folder_that_holds_more_leaves_that_alone(tmp_path: Path) -> None:
    accelerator = loops.new_accelerator()
    place = tmp_path / "run" / "step_1"
    place.mkdir(parents=True)
    (place / "notes.txt").write_text("of the user's")
    (place / "model.safetensors").write_text("old")
    saved(accelerator, tmp_path / "run")
    assert (place / "notes.txt").read_text() == "of the user's"
    assert checkpoint_files.torn(place, ACCELERATE_LAST) is None
    saved(accelerator, tmp_path / "run")  # over its own files alone: as a whole
    assert names(tmp_path / "run") == ["step_1", "step_2"]


def test_an_error_while_it_is_written_leaves_what_was_there(tmp_path: Path) -> None:
    folder = whole(tmp_path / "checkpoint-1")
    before = sorted(folder.iterdir())

    def broken() -> None:
        with checkpoint_files.staged(folder, TRAINER_LAST) as stage:
            stage.mkdir()
            (stage / "optimizer.pt").write_text("half")
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        broken()
    assert sorted(folder.iterdir()) == before
    assert checkpoint_files.torn(folder, TRAINER_LAST) is None
    assert names(tmp_path) == ["checkpoint-1"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP])
def test_a_share_that_cannot_sync_folders_keeps_checkpoints_too(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync

    def of_files(place: int) -> None:
        if stat.S_ISDIR(os.fstat(place).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(place)

    monkeypatch.setattr(os, "fsync", of_files)
    with checkpoint_files.staged(tmp_path / "checkpoint-1", TRAINER_LAST) as stage:
        whole(stage)
    assert (tmp_path / "checkpoint-1" / TRAINER_LAST).is_file()


@pytest.mark.parametrize(("number", "kind"), [(errno.EIO, stat.S_IFDIR), (errno.EINVAL, stat.S_IFREG)])
def test_a_disk_that_fails_and_a_file_that_is_not_on_it_are_errors(
    number: int, kind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(place: int) -> None:
        if stat.S_IFMT(os.fstat(place).st_mode) == kind:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", broken)
    with (
        pytest.raises(OSError, match=os.strerror(number)),
        checkpoint_files.staged(tmp_path / "checkpoint-1", TRAINER_LAST) as stage,
    ):
        whole(stage)


def test_what_killed_processes_left_is_removed_and_what_they_set_aside_comes_back(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    alive = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        for name in (
            f".checkpoint-3.saving-{dead.pid}",
            f".checkpoint-3.saving-{os.getpid()}",
            f".checkpoint-2.replaced-{dead.pid}",
            f".checkpoint-1.replaced-{dead.pid}",
            f".checkpoint-4.saving-{alive.pid}",
            ".git",
            "checkpoint-1",
        ):
            (tmp_path / name).mkdir()
        checkpoint_files.sweep(tmp_path)
        left = {".git", "checkpoint-1", "checkpoint-2", f".checkpoint-4.saving-{alive.pid}"}
        assert set(names(tmp_path)) == left
    finally:
        alive.kill()
        alive.wait()


def test_checkpoints_appear_once_they_are_whole(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_save(self, *_: Any, **__: Any) -> None:
            seen.append(
                sorted(each for each in names(tmp_path) if checkpoint_files.torn(tmp_path / each, TRAINER_LAST))
            )

    run = loops.trainer(tmp_path, callbacks=[Look()], save_strategy="steps", save_steps=1, save_total_limit=2)
    run.train()
    assert seen == [[], [], [], []]
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert guards.get("atomic-checkpoint").times == 4


class Hub:
    """Takes note of the folders that are uploaded, and whether each is a whole checkpoint at that moment."""

    def __init__(self) -> None:
        self.uploaded: list[tuple[str, bool]] = []

    def upload_folder(self, *, folder_path: str, **_: Any) -> Future[None]:
        if Path(folder_path).name.startswith("checkpoint"):
            self.uploaded.append(
                (Path(folder_path).name, checkpoint_files.torn(Path(folder_path), TRAINER_LAST) is None)
            )
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_a_push_to_the_hub_waits_until_the_checkpoint_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, run = Hub(), loops.trainer(tmp_path, save_strategy="steps", save_steps=2)
    if hasattr(transformers.trainer, "hf_api"):
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda: hub)
    else:
        monkeypatch.setattr(transformers.trainer, "upload_folder", hub.upload_folder)
    run.args.push_to_hub, run.args.hub_strategy = True, HubStrategy.CHECKPOINT
    run.hub_model_id, run.push_in_progress = "someone/something", None  # as init_hf_repo does
    run.train()
    assert hub.uploaded == [("checkpoint-2", True), ("checkpoint-4", True)]


def test_losses_that_were_not_logged_yet_are_in_the_checkpoint(tmp_path: Path) -> None:
    settings = {"num_train_epochs": 2, "logging_steps": 4, "save_strategy": "steps", "save_steps": 3}
    unbroken = loops.trainer(tmp_path, model=loops.bert(0.3), **settings)
    unbroken.train()

    def logged(run: Any) -> list[float]:
        return [entry["loss"] for entry in run.state.log_history if "loss" in entry]

    run = loops.trainer(tmp_path, model=loops.bert(0.3), **settings)
    guarded = run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(run) == logged(unbroken)
    assert json.loads((tmp_path / "checkpoint-3" / "unlogged_loss.json").read_text())["logged"] == 0
    run = loops.trainer(tmp_path, model=loops.bert(0.3), **settings)
    with guards.suspended("resume-loss"):
        stock = run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert logged(run)[0] != logged(unbroken)[0]
    assert logged(run)[1] == logged(unbroken)[1]
    assert guarded.training_loss == pytest.approx(stock.training_loss)  # the mean of the call's own steps stays that


def test_what_another_host_writes_is_left_alone_for_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    for killed in (True, False):
        with checkpoint_files.staged(tmp_path / "checkpoint-1", TRAINER_LAST) as stage:
            stage.mkdir()
            outer = tmp_path / f".checkpoint-1.saving-{process.pid}"
            (tmp_path / f".checkpoint-1.saving-{os.getpid()}").rename(outer)
        if not killed:
            monkeypatch.setattr("platform.node", lambda: "another-host")
        checkpoint_files.sweep(tmp_path)
        assert outer.exists() != killed
    for path in (outer, *outer.rglob("*")):
        os.utime(path, (0, 0))
    checkpoint_files.sweep(tmp_path)
    assert not outer.exists()
