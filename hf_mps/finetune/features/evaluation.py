"""When a run reports, evaluates and keeps a checkpoint."""

from __future__ import annotations

from hf_mps.finetune.features.base import Draft, Feature
from hf_mps.finetune.stream import pace

LOGGED_ROWS = 50
"""Step lines that a run prints at most, about."""


class Evaluation(Feature):
    """After each epoch, with the newest two checkpoints kept; streamed rows, which have no epochs, after each third."""

    def decide(self, draft: Draft) -> None:
        """Choose the keys `evaluation`, `checkpoints` and `logging_nan_inf_filter`."""
        steps, training, choices = draft.choices["steps"].value, draft.training, draft.choices
        every = next(n * 10**power for power in range(9) for n in (1, 2, 5) if n * 10**power * LOGGED_ROWS >= steps)
        settled = {"logging_steps": every, "eval_strategy": "epoch", "save_strategy": "epoch", "save_total_limit": 2}
        reason = "the default: after each epoch"
        if draft.prepared.stream is not None:
            often, reason = pace.cadence(steps)
            settled |= often
        if "save_total_limit" not in training and training.get("save_strategy") == "no":
            del settled["save_total_limit"]
        choices["evaluation"] = draft.setting("eval_strategy", settled["eval_strategy"], reason)
        reason += f", the newest {training.get('save_total_limit', 2)} kept"
        choices["checkpoints"] = draft.setting("save_strategy", settled["save_strategy"], reason)
        # The filter replaces a NaN loss by the mean of the others, and waits for the device at every step to do so.
        settled["logging_nan_inf_filter"] = False
        reason = "a NaN loss stops the run, and no step waits for the device to look for one"
        choices["logging_nan_inf_filter"] = draft.setting("logging_nan_inf_filter", False, reason)
        draft.arguments |= settled
