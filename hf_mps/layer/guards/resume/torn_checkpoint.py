"""torn-checkpoint: a checkpoint that was not written to its end is not resumed from; the one before it is taken."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from inspect import unwrap
from pathlib import Path
from typing import Any

from hf_mps.core import checkpoint_files
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.resume.atomic_checkpoint import ACCELERATE_LAST, TRAINER_LAST

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

    def __init__(self) -> None:
        super().__init__()
        self._weights: str | None = None  # the folder for the model that model_init makes

    def applies(self) -> Choice[bool]:
        """Whether get_last_checkpoint, without this guard, returns an empty folder for its number."""
        from transformers.trainer_utils import get_last_checkpoint

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "checkpoint-2").mkdir()
            taken = unwrap(get_last_checkpoint)(folder)
        if taken is not None:
            return Choice(True, "tried: get_last_checkpoint of this transformers returns an empty folder")
        return Choice(False, "tried: get_last_checkpoint of this transformers does not return an empty folder")

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
        self._weights = str(folder)
        try:
            return stock(trainer, None, *args, **kwargs)
        finally:
            self._weights = None

    def _model_made(self, stock: OriginalCall, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        made = stock(trainer, *args, **kwargs)
        if self._weights is not None:
            trainer.model = made  # as train does next; what loads weights looks there
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
    """The folders beside this one that are called alike with a lower number, highest first; with `above` all."""
    own = NUMBERED.match(folder.name)
    found = []
    for each in folder.parent.iterdir() if own is not None and folder.parent.is_dir() else ():
        name = NUMBERED.match(each.name)
        if own is None or name is None or name["word"] != own["word"] or not each.is_dir():
            continue
        if above or int(name["number"]) < int(own["number"]):
            found.append((int(name["number"]), each))
    return (each for _, each in sorted(found, reverse=True))


GUARD = TornCheckpoint()
