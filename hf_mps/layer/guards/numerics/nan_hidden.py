"""nan-hidden: Trainer's log shows the loss that is NaN or infinite."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import patch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Put
from hf_mps.layer.guards.base import Guard, names_in
from hf_mps.layer.guards.explicit_args import FILTER, TARGET, track, was_given


class NanHidden(Guard):
    """Tells Trainer's loop alone that the filter is off, unless the user gave it; all others read what is there."""

    name = "nan-hidden"
    what = "logging_nan_inf_filter hides losses that are NaN or infinite, and waits for the device at each step"
    issue = "https://github.com/huggingface/transformers/blob/main/src/transformers/trainer.py (logging_nan_inf_filter)"
    until = "the filter is off by default in the oldest supported transformers"
    patches = {
        TARGET: Put(track),
        f"transformers.training_args:TrainingArguments.{FILTER}": Put("_filter", after="transformers.trainer"),
        "transformers.trainer:Trainer._inner_training_loop": "_trains",
        "transformers.trainer:Trainer._maybe_log_save_evaluate": "_logs",
    }

    _loops: frozenset[CodeType] = frozenset()
    _training: Any = None  # the arguments of the training that runs, where its losses are to be shown

    def applies(self) -> Choice[bool]:
        """Return whether the filter is on by default."""
        from transformers import TrainingArguments

        on = bool(getattr(TrainingArguments, FILTER, False))
        return Choice(on, f"{FILTER} is {'on' if on else 'off'} by default in this transformers")

    def concerns(self, module: ModuleType) -> bool:
        """Always. Raises AttributeError where no loop of Trainer's reads the filter."""
        if hasattr(module, "Trainer"):
            functions = [inspect.unwrap(each) for each in vars(module.Trainer).values() if inspect.isfunction(each)]
            self._loops = frozenset(each.__code__ for each in functions if {FILTER, "training_step"} <= names_in(each))
            if not self._loops:
                raise AttributeError(f"no loop of Trainer reads {FILTER}")
        return True

    def _filter(self, stock: Any) -> Any:
        return stock if isinstance(stock, _Filter) else _Filter(stock)

    def hides(self, arguments: Any, reader: CodeType) -> bool:
        """Return whether `reader` is the loop of the training whose losses are to be shown."""
        return arguments is self._training and self.on and reader in self._loops

    def _trains(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = trainer.args
        given = was_given(arguments, FILTER) or not getattr(arguments, FILTER, False)
        with patch.object(self, "_training", None if given or arguments.device.type != "mps" else arguments):
            return stock(trainer, *args, **kwargs)

    def _logs(self, stock: Callable[..., Any], trainer: Any, tr_loss: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(trainer, tr_loss, *args, **kwargs)
        logged = trainer._globalstep_last_logged == trainer.state.global_step
        # Trainer begins each mean by `tr_loss -= tr_loss`, of which NaN and infinity leave NaN for ever.
        if self._training is not None and logged:
            tr_loss.zero_()  # what it is otherwise, without a wait to find out
            if not math.isfinite(_logged_loss(trainer.state)):
                self.acted("Trainer's log shows a loss that is NaN or infinite", aloud=False)
        return result


def _logged_loss(state: Any) -> float:
    """Return the loss that Trainer logged at this step; 0 where it logged none."""
    entries = (each for each in reversed(state.log_history) if "loss" in each)
    last: dict[str, Any] = next(entries, {})
    return float(last["loss"]) if last.get("step") == state.global_step else 0.0


class _Filter:
    """The argument as a property: its value is where it always is, in the object."""

    def __init__(self, default: bool) -> None:
        self.default = default

    def __get__(self, arguments: Any, owner: Any = None) -> Any:
        if arguments is None:
            return self.default
        # Who reads it decides: only Trainer's loop hears that the filter is off.
        if NAN_HIDDEN.hides(arguments, sys._getframe(1).f_code):
            return False
        return vars(arguments).get(FILTER, self.default)

    def __set__(self, arguments: Any, value: Any) -> None:
        vars(arguments)[FILTER] = value

    def __delete__(self, arguments: Any) -> None:
        del vars(arguments)[FILTER]


NAN_HIDDEN = NanHidden()
