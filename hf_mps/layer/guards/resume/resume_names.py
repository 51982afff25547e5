"""resume-names: Trainer goes on from, or ends with, the weights of a checkpoint whose names are not the model's own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.introspect import names_in

FOLDER = "_hf_mps_read_from"


class ResumeNames(Guard):
    """Where a loaded checkpoint left weights out under other names, reads it again as `from_pretrained` does.

    The fault is not Metal's, and the guard acts on every device: a run that goes on has to be right on each.
    """

    name = "resume-names"
    what = (
        "checkpoints are saved under the hub's names, but a resumed run and load_best_model_at_end look for the model's"
        " own: ViT and others (transformers/conversion_mapping.py) go on with the weights that they began with"
    )
    issue = "https://github.com/huggingface/transformers/issues/48805, #43701"
    until = "the oldest supported transformers has pull request #48822"
    patches = {
        # The two functions that load a checkpoint, and the one that is told what was left out.
        "transformers.trainer:Trainer._load_from_checkpoint": "_resumes",
        "transformers.trainer:Trainer._load_best_model": "_ends",
        "transformers.trainer:Trainer._issue_warnings_after_load": "_told",
    }

    def __init__(self) -> None:
        super().__init__()
        self._converts = False

    def applies(self) -> Choice[bool]:
        """Whether the installed Trainer loads a checkpoint without the conversion that saving undoes."""
        if self._converts:
            return Choice(False, "this transformers converts the names of a checkpoint when it resumes")
        return Choice(True, "this transformers loads a checkpoint by the names in its file")

    def concerns(self, module: ModuleType) -> bool:
        """Whether this Trainer converts no names."""
        self._converts = any("conversion" in word for word in names_in(module.Trainer._load_from_checkpoint))
        return not self._converts

    def _resumes(self, stock: Callable[..., None], trainer: Any, folder: str, model: Any = None) -> None:
        self._within(folder, trainer, lambda: stock(trainer, folder, model))

    def _ends(self, stock: Callable[..., None], trainer: Any) -> None:
        self._within(trainer.state.best_model_checkpoint, trainer, lambda: stock(trainer))

    def _within(self, folder: str, trainer: Any, load: Callable[[], None]) -> None:
        setattr(trainer, FOLDER, folder)
        try:
            load()
        finally:
            trainer.__dict__.pop(FOLDER, None)

    def _told(self, stock: Callable[..., None], trainer: Any, result: Any) -> None:
        folder = getattr(trainer, FOLDER, None)
        if folder is not None and result.missing_keys and result.unexpected_keys and _own(trainer.model):
            left_out = len(result.missing_keys)
            result = _read(trainer.model, folder)
            line = f"{left_out - len(result.missing_keys)} weights of {folder} were found by their names on the hub"
            self.acted(line, aloud=False)
        stock(trainer, result)


def _own(model: Any) -> bool:
    """Whether the model is one that `from_pretrained` makes."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _read(model: Any, folder: str) -> Any:
    """Load the checkpoint's weights by `from_pretrained`'s own conversion; what `load_state_dict` says of them."""
    kind = type(model)
    fresh, found = kind.from_pretrained(folder, dtype=model.dtype, output_loading_info=True, local_files_only=True)
    state = {name: tensor for name, tensor in fresh.state_dict().items() if name not in set(found["missing_keys"])}
    return model.load_state_dict(state, strict=False)


GUARD = ResumeNames()
