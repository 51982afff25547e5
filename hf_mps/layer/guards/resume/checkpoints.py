"""Guards of a checkpoint's files.

atomic-checkpoint: a checkpoint folder appears whole or not at all.
torn-checkpoint: a torn checkpoint gives way to the one before it.
node-weights: `save_on_each_node` stores the weights on every host.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import unwrap
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hf_mps.core import checkpoint_files
from hf_mps.core.choice import Choice
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.patching import OriginalCall, Patch
from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World
from hf_mps.layer.guards.base import Guard, LibraryGuard, first, names_in, then

TRAINER_LAST = "trainer_state.json"
ACCELERATE_LAST = "random_states_*.pkl"


@dataclass
class _Saving:
    """A checkpoint that is being written: the folder it will be, where it is written, what has to wait."""

    run: str
    target: Path
    stage: Path
    later: list[Callable[[], Any]] = field(default_factory=list)


class AtomicCheckpoint(LibraryGuard):
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
    faulty = "{} write checkpoints under their final names"
    cured = "{} rename checkpoints when they are whole"
    patches = {
        "transformers.trainer:Trainer._get_output_dir": "_output_dir",
        "transformers.trainer:Trainer._push_from_checkpoint": "_pushed",
        "transformers.trainer:rotate_checkpoints": "_rotated",
        "transformers.trainer:TrainerState.save_to_json": first("_state_saved"),
        "transformers.trainer:Trainer._save_checkpoint": "_trainer_saves",
        "accelerate.accelerator:Accelerator.save_state": "_accelerator_saves",
    }

    _saving: _Saving | None = None
    _seen: tuple[str, bool] | None = None

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether the library's saving function renames anything."""
        saving = module.Trainer._save_checkpoint if hasattr(module, "Trainer") else module.Accelerator.save_state
        return bool(names_in(saving) & {"rename", "renames", "replace"})

    def _trainer_saves(self, stock: OriginalCall, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        folder = trainer._get_output_dir(trial=kwargs.get("trial", args[1] if len(args) > 1 else None))
        target = Path(folder) / f"checkpoint-{trainer.state.global_step}"
        if sharded or self._saving is not None:
            return stock(trainer, *args, **kwargs)
        several = trainer.args.world_size > 1
        can_stage = checkpoint_files.can_stage(target)
        owner = self._owner(stock, trainer, target, can_stage) if several else os.getpid() if can_stage else None
        if owner is None:
            return stock(trainer, *args, **kwargs)
        with checkpoint_files.staged(target, TRAINER_LAST, owner=owner) as stage:
            saving = self._saving = _Saving(folder, target, stage)
            try:
                # Should the renaming fail, the stock function writes the checkpoint under its name.
                saved = stock.partial(trainer, *args, **kwargs)
            except BaseException:
                if several:
                    # This rank's own error is the one to raise.
                    with suppress(Exception):
                        _gathered(False)
                raise
            finally:
                self._saving = None
            if several and not all(stock.foreign(_gathered, True)):
                error = RunError(f"another rank could not write its part of {target}, which is left as it was")
                error.quiet = True  # that one says why
                raise error
        if several:
            # Nobody goes on before the checkpoint is there.
            stock.foreign(_gathered, True)
        # A push and the removal of older checkpoints wait until this one is there.
        for step in saving.later:
            stock.foreign(step)
        self._note()
        return saved

    def _owner(self, stock: OriginalCall, trainer: Any, target: Path, can_stage: bool) -> int | None:
        """Return which of several processes renames, with save_on_each_node one of a host; None to leave it alone."""
        here = (platform.node(), os.getpid(), bool(trainer.args.should_save), can_stage)
        # Foreign, since it fails as the stock function's own collectives would.
        ranks = stock.foreign(_gathered, here)
        owners = [(host, process) for host, process, saves, _ in ranks if saves]
        if not all(can for *_, can in ranks) or not owners:
            return None
        if len(owners) == 1 and stock.foreign(self._not_shared, trainer, str(target.parent)):
            return None
        of_host = next((process for host, process in owners if host == here[0]), owners[0][1])
        return os.getpid() if trainer.args.should_save else of_host

    def _not_shared(self, trainer: Any, folder: str) -> bool:
        """Return whether a rank does not see the folder of the one that saves; asked for once in a training."""
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
            saving.later += [lambda: _date_last(saving.target), lambda: rotate(output_dir=saving.run)]

    def _state_saved(self, state: Any, json_path: str) -> None:
        saving, best = self._saving, getattr(state, "best_global_step", None)
        if saving is not None and best:
            # The stock function looked for the best checkpoint beside the one that it writes.
            place = os.path.join(saving.run, f"checkpoint-{best}")  # noqa: PTH118  as Trainer spells it
            if Path(place) == saving.target or Path(place).is_dir():
                state.best_model_checkpoint = place

    def _accelerator_saves(
        self, stock: OriginalCall, accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        project = accelerator.project_configuration
        numbered = bool(project.automatic_checkpoint_naming)
        if numbered:
            target = Path(accelerator.project_dir) / "checkpoints" / f"checkpoint_{accelerator.save_iteration}"
        else:
            # Where a link leads: a rename would take the place of the link itself.
            target = Path(os.path.realpath(output_dir or "."))
        refused = target.exists() if numbered else output_dir is None  # in accelerate's words
        if accelerator.num_processes > 1 or refused or not checkpoint_files.can_stage(target):
            return stock(accelerator, output_dir, *args, **kwargs)
        with checkpoint_files.staged(target, ACCELERATE_LAST, levels=2 if numbered else 1) as stage:
            if numbered:  # in a project that holds no checkpoint to number or to remove
                with patch.object(project, "project_dir", str(stage.parent.parent)):
                    saved = stock.partial(accelerator, output_dir, *args, **kwargs)
            else:
                saved = stock.partial(accelerator, str(stage), *args, **kwargs)
        # The oldest are removed after the newest is there.
        if numbered and project.total_limit:
            found = (re.fullmatch(r"checkpoint_(\d+)", path.name) for path in target.parent.iterdir())
            oldest = sorted((each for each in found if each), key=lambda each: int(each[1]))[: -project.total_limit]
            for each in oldest:
                shutil.rmtree(target.parent / each[0], ignore_errors=True)
        self._note()
        given = target if numbered else Path(output_dir)
        return given if saved == stage else saved

    def _note(self) -> None:
        self.acted("checkpoints appear under their names when they are whole and on the disk", aloud=False)


def _gathered(value: Any) -> list[Any]:
    """Return the value of each process."""
    from accelerate.utils import gather_object

    values: list[Any] = gather_object([value])
    return values


def _date_last(target: Path) -> None:
    """Give the checkpoint just written a later date than its older ones, where the clock went back in between."""
    # Trainer removes the oldest by their dates, and would remove this one (huggingface/transformers#26961).
    dates = [path.stat().st_mtime for path in target.parent.glob("checkpoint-*") if path != target]
    if dates and max(dates) > target.stat().st_mtime:
        os.utime(target, (max(dates) + 1, max(dates) + 1))


NUMBERED = re.compile(r"^(?P<word>.*\D)(?P<number>\d+)$")


class TornCheckpoint(Guard):
    """Looks into the folder before it is resumed from, whatever the device: files have none.

    Where a library was to choose the last one, it gets the last whole one; a folder that the user named is refused,
    with the whole one before it in the line. A model's folder is no torn checkpoint: scripts of transformers 4 resume
    from `--model_name_or_path` and trained from its weights, which Trainer 5 loads before a FileNotFoundError ends it.
    """

    name = "torn-checkpoint"
    what = "the last checkpoint is chosen by its number alone, so that half of one ends the resumed run, or is loaded"
    issue = "https://github.com/huggingface/transformers/issues/35525"
    until = "the oldest supported transformers and accelerate look into the folder that they choose"
    patches = {
        "accelerate.accelerator:Accelerator.load_state": "_accelerator_loads",
        "transformers.trainer_utils:get_last_checkpoint": "_last",
        "transformers.trainer:get_last_checkpoint": "_last",
        "transformers.trainer:Trainer.train": "_trained",
        "transformers.trainer:Trainer.call_model_init": "_model_made",
    }

    _weights: str | None = None  # the folder for the model that model_init makes

    def applies(self) -> Choice[bool]:
        """Return whether get_last_checkpoint, without this guard, returns an empty folder for its number."""
        from transformers.trainer_utils import get_last_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "checkpoint-2").mkdir()
            taken = unwrap(get_last_checkpoint)(folder)
        does = "returns" if taken is not None else "does not return"
        return Choice(taken is not None, f"tried: get_last_checkpoint of this transformers {does} an empty folder")

    def _last(self, stock: Callable[..., Any], folder: Any) -> Any:
        checkpoint_files.sweep(Path(folder))
        last = stock(folder)
        return last if last is None else self._whole(Path(last), TRAINER_LAST, given=last)

    def _trained(
        self, stock: OriginalCall, trainer: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if not resume_from_checkpoint or isinstance(resume_from_checkpoint, bool):
            return stock(trainer, resume_from_checkpoint, *args, **kwargs)
        folder = Path(resume_from_checkpoint)
        alone = checkpoint_files.model_alone(folder)
        self._refuse(folder, "*" if alone else TRAINER_LAST, "resume_from_checkpoint")
        if not alone or trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
            return stock(trainer, resume_from_checkpoint, *args, **kwargs)
        self.acted(
            f"resume_from_checkpoint: {folder} holds a model and no {TRAINER_LAST}: training begins at step 0 with its"
            " weights"
        )
        if trainer.model_init is None:
            stock.foreign(trainer._load_from_checkpoint, str(folder))
            return stock(trainer, None, *args, **kwargs)
        with patch.object(self, "_weights", str(folder)):
            return stock(trainer, None, *args, **kwargs)

    def _model_made(self, stock: OriginalCall, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock(trainer, *args, **kwargs)
        if self._weights is not None:
            # As train does next: what loads weights looks there.
            trainer.model = made
            stock.foreign(trainer._load_from_checkpoint, self._weights)
        return made

    def _accelerator_loads(
        self, stock: Callable[..., Any], accelerator: Any, input_dir: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if input_dir is not None:
            folder = Path(input_dir).expanduser()
            checkpoint_files.sweep(folder.parent)
            if folder.is_dir() and accelerator.num_processes == 1:
                self._refuse(folder, ACCELERATE_LAST, "load_state")
        elif accelerator.project_configuration.automatic_checkpoint_naming:
            place = Path(accelerator.project_dir) / "checkpoints"
            checkpoint_files.sweep(place.parent)
            # Any number will do: with `above` it is the word that counts.
            newest = next(_before(place / "checkpoint_9", above=True), None)
            if newest is not None:
                whole = self._whole(newest, ACCELERATE_LAST, given=str(newest))
                if whole is None:
                    raise UserError(f"{place} holds no whole checkpoint; next: start from the beginning")
                input_dir = whole
        return stock(accelerator, input_dir, *args, **kwargs)

    def _whole(self, folder: Path, last: str, *, given: Any) -> Any:
        """`given` where `folder` is whole, else the newest whole one before it, with a line that says so, or None."""
        wrong = checkpoint_files.torn(folder, last)
        if wrong is None:
            return given
        whole = _whole_before(folder, last)
        taken = f"the one before is taken, {whole.name}" if whole else "and none before it is whole"
        self.acted(f"{folder} is torn ({wrong}): {taken}")
        return str(whole) if whole else None

    def _refuse(self, folder: Path, last: str, asked: str) -> None:
        """Raise UserError where the folder that the user named is torn."""
        wrong = checkpoint_files.torn(folder, last) if folder.is_dir() else None
        if wrong is not None:
            whole = _whole_before(folder, last)
            next_step = f"{asked}={whole}" if whole else "start from the beginning, no whole checkpoint is before it"
            self.acted(f"{folder} is torn ({wrong}) and was refused", aloud=False)
            raise UserError(f"{asked}: {folder} is torn ({wrong}); next: {next_step}")


def _whole_before(folder: Path, last: str) -> Path | None:
    return next((each for each in _before(folder) if checkpoint_files.torn(each, last) is None), None)


def _before(folder: Path, *, above: bool = False) -> Iterator[Path]:
    """Return the folders beside this one that are called alike with a lower number, highest first; with `above` all."""
    own = NUMBERED.match(folder.name)
    if own is None or not folder.parent.is_dir():
        return iter(())
    named = ((NUMBERED.match(each.name), each) for each in folder.parent.iterdir() if each.is_dir())
    alike = [(int(name["number"]), each) for name, each in named if name and name["word"] == own["word"]]
    return (each for number, each in sorted(alike, reverse=True) if above or number < int(own["number"]))


class NodeWeights(LibraryGuard):
    """Lets the first process of each host write the weights that it is told to write, once arguments ask for that.

    transformers 5.23 asks in `save_pretrained` whether its process is rank 0, whatever Trainer says; 5.12 did not.
    """

    name = "node-weights"
    what = (
        "save_on_each_node leaves the weights out on every host but the first, so that a run cannot resume there and"
        " load_best_model_at_end keeps other weights"
    )
    issue = "transformers/distributed/mixin.py should_save_on_this_rank (transformers#12421 added save_on_each_node)"
    until = "transformers' should_save_on_this_rank goes by what Trainer says"
    faulty = "this transformers writes weights on rank 0 alone"
    cured = "this transformers writes weights where Trainer says so"
    patches = {
        "transformers.training_args:TrainingArguments.__post_init__": then("_made"),
        "transformers.distributed.mixin:DistributedMixin.should_save_on_this_rank": Patch("_saves", optional=True),
    }

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether saving does not look at the rank; the arguments tell nothing of it."""
        mixin = getattr(module, "DistributedMixin", None)
        asked = getattr(mixin, "should_save_on_this_rank", None)
        return mixin and (asked is None or "_get_torch_distributed_rank" not in names_in(asked))

    def reset(self) -> None:
        """Also forget what earlier arguments asked for."""
        super().reset()
        self._each_node = False

    def _made(self, arguments: Any) -> None:
        self._each_node = self._each_node or bool(arguments.save_on_each_node)

    def _saves(self, stock: Callable[..., bool], model: Any, is_main_process: bool) -> bool:
        if stock(model, is_main_process):
            return True
        if not (is_main_process and self._each_node and World.here().local_main):
            return False
        self.acted("each host has the weights in its checkpoints", aloud=False)
        return True
