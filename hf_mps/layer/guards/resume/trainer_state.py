"""Guards of what Trainer keeps of a training.

resume-loss: Trainer's checkpoints carry the loss that was not logged yet.
resume-names: Trainer loads a checkpoint's weights whose names are not the model's own.
resume-end: Trainer takes no step from a checkpoint of the last, and none after a restored early stop.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hf_mps.core.files import write_atomic
from hf_mps.layer.guards.base import Guard, LibraryGuard, first, names_in, then
from hf_mps.layer.guards.resume import exact_on, in_recipe, random_numbers

FILE = "unlogged_loss.json"
_WHOLE = "_hf_mps_whole_loss"


class ResumeLoss(LibraryGuard):
    """Writes the sum and the step of the last log entry into its own file, and puts both back.

    In a recipe's run the sum of what was logged too: `train_loss` is then the mean over the whole run, not over the
    steps of the last call, as it stays in scripts.
    """

    name = "resume-loss"
    what = (
        "a checkpoint between two log entries forgets the losses since the last, so the next entry of a resumed run is"
        " another mean"
    )
    issue = "transformers/trainer.py _inner_training_loop (tr_loss, _globalstep_last_logged)"
    until = "the oldest supported transformers keeps both in its checkpoints"
    faulty = "this transformers begins a new mean of the losses wherever it resumes"
    cured = "this transformers keeps the step of the last log entry in its checkpoints"
    patches = {
        "transformers.trainer:Trainer._save_rng_state": then("_saved"),
        "transformers.trainer:Trainer._load_rng_state": then("_loaded"),
        "transformers.trainer:Trainer.log": first("_logged"),
    }

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether Trainer's saving function names the step of the last log entry."""
        return "_globalstep_last_logged" in names_in(module.Trainer._save_checkpoint)

    def _saved(self, trainer: Any, output_dir: str) -> None:
        since, unlogged = trainer._globalstep_last_logged, getattr(trainer, "_tr_loss", None)
        new = since < trainer.state.global_step or in_recipe()
        if exact_on(trainer.args.device.type) and unlogged is not None and new:
            rest = {"sum": float(unlogged), "logged": since, "total": trainer._total_loss_scalar}
            write_atomic(random_numbers.own(Path(output_dir) / FILE), json.dumps(rest))
            self.acted(f"checkpoints also hold the loss since the last log entry, in {FILE}", aloud=False)

    def _loaded(self, trainer: Any, checkpoint: str | None) -> None:
        file = random_numbers.own(Path(checkpoint or "") / FILE)
        if checkpoint is None or not exact_on(trainer.args.device.type) or not file.is_file():
            return
        rest = json.loads(file.read_text(encoding="utf-8"))
        trainer._globalstep_last_logged = rest["logged"]
        if in_recipe() and "total" in rest:
            trainer._total_loss_scalar = rest["total"]
            trainer.__dict__[_WHOLE] = True
        else:
            # train_loss is the mean of this call's steps alone.
            trainer._total_loss_scalar -= rest["sum"]
        trainer._tr_loss += rest["sum"]

    def _logged(self, trainer: Any, logs: dict[str, float], *_: Any, **__: Any) -> None:
        if "train_loss" in logs and in_recipe():
            self.safely(self._cover_run, trainer, logs)

    def _cover_run(self, trainer: Any, logs: dict[str, float]) -> None:
        total = trainer._total_loss_scalar if trainer.__dict__.pop(_WHOLE, False) else None
        # Of a checkpoint of the last step nothing was restored.
        if total is None and trainer.__dict__.get(FROM):
            file = random_numbers.own(Path(trainer.__dict__[FROM]) / FILE)
            rest = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
            total = rest["total"] + rest["sum"] if "total" in rest else None
        if total is not None:
            logs["train_loss"] = total / trainer.state.global_step


FOLDER = "_hf_mps_read_from"


class ResumeNames(LibraryGuard):
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
    faulty = "this transformers loads a checkpoint by the names in its file"
    cured = "this transformers converts the names of a checkpoint when it resumes"
    patches = {
        # The two functions that load a checkpoint, and the one that is told what was left out.
        "transformers.trainer:Trainer._load_from_checkpoint": "_loads",
        "transformers.trainer:Trainer._load_best_model": "_loads",
        "transformers.trainer:Trainer._issue_warnings_after_load": "_told",
    }

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether Trainer's loading function has the conversion that saving undoes."""
        return any("conversion" in word for word in names_in(module.Trainer._load_from_checkpoint))

    def _loads(self, stock: Callable[..., None], trainer: Any, *given: Any, **named: Any) -> None:
        with patch.object(trainer, FOLDER, given[0] if given else trainer.state.best_model_checkpoint, create=True):
            stock(trainer, *given, **named)

    def _told(self, stock: Callable[..., None], trainer: Any, result: Any) -> None:
        from transformers import PreTrainedModel

        folder, own = getattr(trainer, FOLDER, None), isinstance(trainer.model, PreTrainedModel)
        if folder is not None and result.missing_keys and result.unexpected_keys and own:
            left_out = len(result.missing_keys)
            result = _read(trainer.model, folder)
            line = f"{left_out - len(result.missing_keys)} weights of {folder} were found by their names on the hub"
            self.acted(line, aloud=False)
        stock(trainer, result)


def _read(model: Any, folder: str) -> Any:
    """Load the checkpoint's weights by `from_pretrained`'s own conversion; what `load_state_dict` says of them."""
    kind = type(model)
    fresh, found = kind.from_pretrained(folder, dtype=model.dtype, output_loading_info=True, local_files_only=True)
    state = {name: tensor for name, tensor in fresh.state_dict().items() if name not in set(found["missing_keys"])}
    return model.load_state_dict(state, strict=False)


STATE = "trainer_state.json"
FROM, EPOCHS = "_hf_mps_goes_on_from", "_hf_mps_epochs"


class ResumeEnd(Guard):
    """Leaves no epoch to a run whose checkpoint says that it has ended: what follows the last step follows at once.

    Trainer looks whether a run is over behind each step and never before one. A checkpoint at the end of an epoch is
    safe, because no epoch is left; with max_steps, or a fraction as the number of epochs, the last one is left begun.
    The same holds for early stopping where restore_callback_states_from_checkpoint brings its count back. The fault is
    not Metal's, and the guard acts on every device: a run that goes on has to be right on each.
    """

    name = "resume-end"
    what = (
        "a run resumed from the checkpoint of its last step takes one step more (151 of 150) wherever that step is not"
        " the last of an epoch, and ends with other weights"
    )
    issue = "transformers/trainer.py _run_epoch (should_training_stop is read behind a step alone)"
    always = "Trainer compares the step with max_steps behind each step, never before the first"
    until = "the oldest supported transformers compares global_step with max_steps before the first step"
    patches = {
        # The loop, which knows the checkpoint, and the function that counts the epochs.
        "transformers.trainer:Trainer._inner_training_loop": "_loops",
        "transformers.trainer:Trainer.set_initial_training_values": "_counts",
    }

    def _loops(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        # Behind the batch size and the arguments, where it is not named.
        trainer.__dict__[FROM] = kwargs.get("resume_from_checkpoint", args[2] if len(args) > 2 else None)
        try:
            return stock(trainer, *args, **kwargs)
        finally:
            trainer.__dict__.pop(FROM, None)
            if (epochs := trainer.__dict__.pop(EPOCHS, None)) is not None:
                trainer.state.num_train_epochs = epochs

    def _counts(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        epochs, per_epoch, *others = values = stock(trainer, *args, **kwargs)
        # What the checkpoint says of its training, nothing where it is no whole one or there is none
        checkpoint = trainer.__dict__.get(FROM)
        file = Path(checkpoint or "") / STATE
        state = dict(json.loads(file.read_text(encoding="utf-8"))) if checkpoint and file.is_file() else {}
        step, last = state.get("global_step", 0), others[-1]
        if not step or not (step >= last or _stopped_early(trainer, state)):
            return values
        begun = step // per_epoch
        if begun < epochs:
            trainer.__dict__[EPOCHS] = epochs
            why = f"step {step} of {last} is the last" if step >= last else f"early stopping ended it at step {step}"
            self.acted(f"the run to go on with had ended ({why}): no further step is taken", aloud=False)
        return (min(begun, epochs), per_epoch, *others)


def _stopped_early(trainer: Any, state: dict[str, Any]) -> bool:
    """Return whether early stopping, whose count the user wants back, had run out of patience."""
    if not getattr(trainer.args, "restore_callback_states_from_checkpoint", False):
        return False
    stored = (state.get("stateful_callbacks") or {}).get("EarlyStoppingCallback") or {}
    every = stored if isinstance(stored, list) else [stored]
    return any(
        one["attributes"]["early_stopping_patience_counter"] >= one["args"]["early_stopping_patience"]
        for one in every
        if one
    )
