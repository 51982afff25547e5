"""nan-hidden: a loss that is no number is shown, instead of being replaced by an average."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards.guard import Guard, around
from hf_mps.guards.said import FILTER, remember, said


class NanHidden(Guard):
    """Switches Trainer's filter off, unless the user gave it; the sentinel non-finite then stops at what is shown."""

    name = "nan-hidden"
    what = "logging_nan_inf_filter hides losses that are no numbers, and waits for the device at each step"
    issue = "https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py (logging_nan_inf_filter)"
    until = "the filter is off by default in the oldest supported transformers"

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


GUARD = NanHidden()
