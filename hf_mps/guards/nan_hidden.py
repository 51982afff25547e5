"""nan-hidden: a loss that is no number is shown and stops the run, instead of being replaced by an average."""

from __future__ import annotations

import math
from numbers import Real
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.errors import RunError
from hf_mps.guards.guard import Guard, around
from hf_mps.guards.said import remember, said

FILTER = "logging_nan_inf_filter"


class NanHidden(Guard):
    """Switches Trainer's filter off and adds a callback that stops, unless the user gave logging_nan_inf_filter."""

    name = "nan-hidden"
    what = "logging_nan_inf_filter hides losses that are no numbers, and waits for the device at each step"
    issue = "https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py (logging_nan_inf_filter)"
    until = "the filter is off by default in the oldest supported transformers and Trainer stops by itself"

    def applies(self) -> Choice[bool]:
        """Whether the filter is on by default."""
        from transformers import TrainingArguments

        if getattr(TrainingArguments, FILTER, False):
            return Choice(True, f"{FILTER} is on by default in this transformers")
        return Choice(False, f"{FILTER} is off by default in this transformers")

    def install(self, module: ModuleType) -> None:
        """Note what users say to TrainingArguments; put it around Trainer.__init__."""
        remember(module.TrainingArguments)
        if module.__name__ == "transformers.trainer":
            around(self, module.Trainer, "__init__", self._trainer_made)

    def _trainer_made(self, stock: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        arguments = trainer.args
        if arguments.device.type != "mps" or said(arguments, FILTER):
            return
        if getattr(arguments, FILTER, False):
            setattr(arguments, FILTER, False)
            self.acted(f"{FILTER} is off: a loss that is no number is shown and stops the run")
        trainer.add_callback(_stop_on_non_finite(self))


def not_finite(args: Any, logs: dict[str, Any] | None) -> str | None:
    """Name and value of the first loss or gradient norm in Trainer's `logs` that is no number ("loss is nan"), or None.

    Under fp16 the losses alone count: a gradient norm may overflow there, and GradScaler skips that step.
    """
    watched = ("loss", "eval_loss") if args.fp16 else ("loss", "eval_loss", "grad_norm")
    for name in watched:
        value = (logs or {}).get(name)
        if isinstance(value, Real) and not math.isfinite(value):
            return f"{name} is {value}"
    return None


def _stop_on_non_finite(guard: Guard) -> Any:
    from transformers import TrainerCallback

    class StopOnNonFinite(TrainerCallback):  # type: ignore[misc]
        """Ends the run at the first logged loss or gradient norm that is no number; checkpoints stay as they are."""

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            found = not_finite(args, logs) if guard.on else None
            if found:
                raise RunError(
                    f"{found} at step {state.global_step} of {state.max_steps}; next: a lower "
                    f"learning_rate (now {args.learning_rate:g}), or {FILTER}=True to go on regardless"
                )

    return StopOnNonFinite()


GUARD = NanHidden()
