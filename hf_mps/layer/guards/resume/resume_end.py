"""resume-end: Trainer takes no step from a checkpoint of the last step, and none after a restored early stop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.layer.guards.base import Guard

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
    until = "the oldest supported transformers compares global_step with max_steps before the first step"
    patches = {
        # The loop, which knows the checkpoint, and the function that counts the epochs.
        "transformers.trainer:Trainer._inner_training_loop": "_loops",
        "transformers.trainer:Trainer.set_initial_training_values": "_counts",
    }

    def applies(self) -> Choice[bool]:
        """No Trainer so far compares the two before a step."""
        return Choice(True, "Trainer compares the step with max_steps behind each step, never before the first")

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
        state = _state(trainer.__dict__.get(FROM))
        step, last = state.get("global_step", 0), others[-1]
        if not step or not (step >= last or _stopped_early(trainer, state)):
            return values
        begun = step // per_epoch
        if begun < epochs:
            trainer.__dict__[EPOCHS] = epochs
            why = f"step {step} of {last} is the last" if step >= last else f"early stopping ended it at step {step}"
            self.acted(f"the run to go on with had ended ({why}): no further step is taken", aloud=False)
        return (min(begun, epochs), per_epoch, *others)


def _state(checkpoint: Any) -> dict[str, Any]:
    """What the checkpoint says of its training, nothing where it is no whole one or there is none."""
    file = Path(checkpoint or "") / STATE
    return dict(json.loads(file.read_text(encoding="utf-8"))) if checkpoint and file.is_file() else {}


def _stopped_early(trainer: Any, state: dict[str, Any]) -> bool:
    """Whether early stopping, whose count the user wants back, had run out of patience."""
    if not getattr(trainer.args, "restore_callback_states_from_checkpoint", False):
        return False
    stored = (state.get("stateful_callbacks") or {}).get("EarlyStoppingCallback") or {}
    every = stored if isinstance(stored, list) else [stored]
    return any(
        one["attributes"]["early_stopping_patience_counter"] >= one["args"]["early_stopping_patience"]
        for one in every
        if one
    )


GUARD = ResumeEnd()
