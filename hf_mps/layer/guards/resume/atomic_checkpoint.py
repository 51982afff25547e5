"""atomic-checkpoint: a checkpoint folder of Trainer or Accelerator appears whole or not at all."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from hf_mps.core import checkpoint_files
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError
from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.distributed.ranks import Ranks
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.introspect import names_in

TRAINER_LAST = "trainer_state.json"
ACCELERATE_LAST = "random_states_*.pkl"


@dataclass
class _Saving:
    """A checkpoint that is being written: the folder it will be, where it is written, what has to wait."""

    run: str
    target: Path
    stage: Path
    later: list[Callable[[], Any]] = field(default_factory=list)


class AtomicCheckpoint(Guard):
    """Lets the stock functions write into a hidden folder beside the checkpoint, which is renamed when all is on disk.

    Whatever the device: files have none, and what was torn on the CPU is as torn on Metal. Several processes of Trainer
    write into one hidden folder, renamed once all have written: stock, the file that makes a checkpoint look whole may
    be there before another rank's random state. Left alone are sharded ones, Accelerate's of several processes, and
    those of hosts that neither share a folder nor save on each node.
    """

    name = "atomic-checkpoint"
    what = "a checkpoint is written file by file under its final name, so that a run killed meanwhile leaves half of it"
    issue = "https://github.com/huggingface/transformers/issues/35782"
    until = "the oldest supported transformers and accelerate write under another name and rename (transformers#27820)"
    patches = {
        "transformers.trainer:Trainer._get_output_dir": "_output_dir",
        "transformers.trainer:Trainer._push_from_checkpoint": "_pushed",
        # 5.0 has a method for what is a function later.
        "transformers.trainer:rotate_checkpoints": Patch("_rotated", formerly="Trainer._rotate_checkpoints"),
        "transformers.trainer:TrainerState.save_to_json": "_state_saved",
        "transformers.trainer:Trainer._save_checkpoint": "_trainer_saves",
        "accelerate.accelerator:Accelerator.save_state": "_accelerator_saves",
    }

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[str, bool] = {}
        self._saving: _Saving | None = None
        self._seen: tuple[str, bool] | None = None

    def applies(self) -> Choice[bool]:
        """Whether the installed libraries' saving functions rename nothing."""
        lacking = [library for library, renames in self._found.items() if not renames]
        if lacking:
            return Choice(True, f"{' and '.join(lacking)} write checkpoints under their final names")
        return Choice(False, f"{' and '.join(self._found)} rename checkpoints when they are whole")

    def concerns(self, module: ModuleType) -> bool:
        """Whether the library's saving function renames nothing."""
        saving = module.Trainer._save_checkpoint if hasattr(module, "Trainer") else module.Accelerator.save_state
        library = module.__name__.partition(".")[0]
        self._found[library] = bool(names_in(saving) & {"rename", "renames", "replace"})
        self._verdict = None
        return not self._found[library]

    def _trainer_saves(self, stock: OriginalCall, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        folder = trainer._get_output_dir(trial=kwargs.get("trial", args[1] if len(args) > 1 else None))
        target = Path(folder) / f"checkpoint-{trainer.state.global_step}"
        if sharded or self._saving is not None:
            return stock(trainer, *args, **kwargs)
        if trainer.args.world_size > 1:
            return self._together(stock, trainer, folder, target, *args, **kwargs)
        if not checkpoint_files.can_stage(target):
            return stock(trainer, *args, **kwargs)
        with checkpoint_files.staged(target, TRAINER_LAST) as stage:
            saving = self._saving = _Saving(folder, target, stage)
            try:
                # Should the renaming fail, the stock function writes the checkpoint under its name.
                saved = stock.partial(trainer, *args, **kwargs)
            finally:
                self._saving = None
        for step in saving.later:  # a push and the removal of older ones, once this one is there
            stock.foreign(step)
        self._note()
        return saved

    def _together(self, stock: OriginalCall, trainer: Any, folder: str, target: Path, *args: Any, **kwargs: Any) -> Any:
        """The same in each of several processes, of which one, or with save_on_each_node one of each host, renames."""
        here = (platform.node(), os.getpid(), bool(trainer.args.should_save), checkpoint_files.can_stage(target))
        # What they tell each other fails as the stock function's own collectives would.
        ranks = stock.foreign(_gathered, here)
        owners = [(host, process) for host, process, saves, _ in ranks if saves]
        if not all(can for *_, can in ranks) or not owners:
            return stock(trainer, *args, **kwargs)
        owner = next((process for host, process in owners if host == here[0]), owners[0][1])
        if len(owners) == 1 and stock.foreign(self._not_shared, trainer, folder):
            return stock(trainer, *args, **kwargs)
        owner = os.getpid() if trainer.args.should_save else owner
        with checkpoint_files.staged(target, TRAINER_LAST, owner=owner) as stage:
            saving = self._saving = _Saving(folder, target, stage)
            try:
                saved = stock.partial(trainer, *args, **kwargs)
            except BaseException:
                with suppress(Exception):  # this rank's own error is the one to raise
                    _gathered(False)
                raise
            finally:
                self._saving = None
            if not all(stock.foreign(_gathered, True)):
                raise _elsewhere(target)
        stock.foreign(_gathered, True)  # nobody goes on before it is there
        for step in saving.later:
            stock.foreign(step)
        self._note()
        return saved

    def _not_shared(self, trainer: Any, folder: str) -> bool:
        """Whether a rank does not see the folder of the one that saves; asked for once in a training."""
        ranks = Ranks.here()
        if ranks.world.size != trainer.args.world_size or ranks.world.hosts == 1:
            return False
        if self._seen is None or self._seen[0] != folder:

            def make() -> None:
                if ranks.world.main:
                    Path(folder).mkdir(parents=True, exist_ok=True)

            ranks.run_on_all(make)
            self._seen = folder, not all(ranks.sees(Path(folder)))
        return self._seen[1]

    def _output_dir(self, stock: Callable[..., str], trainer: Any, *args: Any, **kwargs: Any) -> str:
        return str(self._saving.stage.parent) if self._saving else stock(trainer, *args, **kwargs)

    def _pushed(self, stock: Callable[..., None], trainer: Any, checkpoint_folder: Any) -> None:
        saving = self._saving
        if saving is None:
            stock(trainer, checkpoint_folder)
        else:
            saving.later.append(lambda: stock(trainer, str(saving.target)))

    def _rotated(self, stock: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        saving = self._saving

        def rotate(**changed: Any) -> None:
            with checkpoint_files.removed_whole():
                stock(*args, **{**kwargs, **changed})

        if saving is None:
            rotate()
        else:
            saving.later.append(lambda: _date_last(saving.target))
            saving.later.append(lambda: rotate(output_dir=saving.run))

    def _state_saved(self, stock: Callable[..., None], state: Any, json_path: str) -> None:
        saving, best = self._saving, getattr(state, "best_global_step", None)
        if saving is not None and best:
            # The stock function looked for the best checkpoint beside the one that it writes.
            place = os.path.join(saving.run, f"checkpoint-{best}")  # noqa: PTH118  as Trainer spells it
            if Path(place) == saving.target or Path(place).is_dir():
                state.best_model_checkpoint = place
        stock(state, json_path)

    def _accelerator_saves(
        self, stock: OriginalCall, accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        project = accelerator.project_configuration
        numbered = bool(project.automatic_checkpoint_naming)
        if numbered:
            target = Path(accelerator.project_dir) / "checkpoints" / f"checkpoint_{accelerator.save_iteration}"
        else:
            target = Path(os.path.realpath(output_dir or "."))
        if (
            accelerator.num_processes > 1
            or (target.exists() if numbered else output_dir is None)  # refused, in accelerate's words
            or not checkpoint_files.can_stage(target)
        ):
            return stock(accelerator, output_dir, *args, **kwargs)
        with checkpoint_files.staged(target, ACCELERATE_LAST, levels=2 if numbered else 1) as stage:
            if numbered:
                saved = _in_project(stage.parent.parent, stock.partial, accelerator, output_dir, *args, **kwargs)
            else:
                saved = stock.partial(accelerator, str(stage), *args, **kwargs)
        if numbered:
            _limit(target.parent, project.total_limit)
        self._note()
        given = target if numbered else Path(output_dir)
        return given if saved == stage else saved

    def _note(self) -> None:
        self.acted("checkpoints appear under their names when they are whole and on the disk", aloud=False)


def _gathered(value: Any) -> list[Any]:
    """The value of each process."""
    from accelerate.utils import gather_object

    values: list[Any] = gather_object([value])
    return values


def _date_last(target: Path) -> None:
    """Give the checkpoint just written a later date than its older ones, where the clock went back in between.

    Trainer removes the oldest by their dates, and would remove this one (huggingface/transformers#26961).
    """
    dates = [path.stat().st_mtime for path in target.parent.glob("checkpoint-*") if path != target]
    if dates and max(dates) > target.stat().st_mtime:
        os.utime(target, (max(dates) + 1, max(dates) + 1))


def _elsewhere(target: Path) -> RunError:
    """What ends the ranks that wrote their part where another could not; that one says why."""
    error = RunError(f"another rank could not write its part of {target}, which is left as it was")
    error.quiet = True
    return error


def _in_project(folder: Path, stock: Callable[..., Any], accelerator: Any, *args: Any, **kwargs: Any) -> Any:
    """Save where `folder` is the project's, which holds no checkpoint to number or to remove."""
    project = accelerator.project_configuration
    given = project.project_dir
    project.project_dir = str(folder)
    try:
        return stock(accelerator, *args, **kwargs)
    finally:
        project.project_dir = given


def _limit(folder: Path, limit: int | None) -> None:
    """Remove the oldest of accelerate's numbered checkpoints over `limit`, after the newest is there."""
    numbered = {
        int(found[1]): path for path in folder.iterdir() if (found := re.fullmatch(r"checkpoint_(\d+)", path.name))
    }
    for number in sorted(numbered)[: -limit or None] if limit else ():
        shutil.rmtree(numbered[number], ignore_errors=True)


GUARD = AtomicCheckpoint()
