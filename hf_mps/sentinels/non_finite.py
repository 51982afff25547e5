"""non-finite: a loss or a gradient that is no number ends the run, before a checkpoint is written over a good one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from types import ModuleType
from typing import Any

from hf_mps.errors import RunError
from hf_mps.guards.said import FILTER, remember, said
from hf_mps.installed import around
from hf_mps.sentinels.sentinel import Sentinel


class NonFinite(Sentinel):
    """Stops at what Trainer logs, at once, and in every loop at what the stream reads.

    Before a checkpoint all that there is is read, so that none holds weights of a training that has ended. A step that
    fp16's GradScaler skips is no error; many in a row, all without a loss, are. Somebody who asks Trainer for
    logging_nan_inf_filter wants to go on.
    """

    name = "non-finite"
    what = "a loss or gradient norm that is nan or infinite"
    why = "stops the run, because no later step can mend weights that are no numbers; checkpoints stay as they are"

    def install(self, module: ModuleType) -> None:
        """Also look at what Trainer logs, and before Trainer and Accelerator write checkpoints."""
        super().install(module)
        if module.__name__ == "transformers.training_args":
            remember(module.TrainingArguments)
        elif module.__name__ == "transformers.trainer":
            around(self, module.Trainer, "__init__", self._trainer_made)
            around(self, module.Trainer, "train", self._trained)
            around(self, module.Trainer, "_save_checkpoint", self._read_first)
        elif module.__name__ == "accelerate.accelerator":
            around(self, module.Accelerator, "save_state", self._read_first)

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """Raise RunError at the first that is no number."""
        for what, values in (("loss", losses), ("gradient norm", norms)):
            for step, value in values:
                if not math.isfinite(value):
                    self._stop(f"the {what} is {value} at optimizer step {step}; next: a lower learning rate, {OFF}")

    def look_at_skipped(self, losses: Sequence[float]) -> None:
        """Raise RunError where none is a number: another scale cannot mend that, as it mends gradients."""
        if not any(map(math.isfinite, losses)):
            self._stop(
                f"the loss is {losses[-1]} in {len(losses)} steps in a row, all of which GradScaler skipped; next: bf16"
                f" in place of fp16, or a lower learning rate, {OFF}"
            )

    def _stop(self, line: str) -> None:
        self.acted(line, aloud=False)  # the error says it
        raise RunError(line)

    def _trainer_made(self, stock: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        there = any(getattr(each, "stops_on_non_finite", False) for each in trainer.callback_handler.callbacks)
        if trainer.args.device.type == "mps" and not there and not _goes_on(trainer.args):
            trainer.add_callback(_callback(self))

    def _trained(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if _goes_on(trainer.args):
            self.suspended += 1
            try:
                return stock(trainer, *args, **kwargs)
            finally:
                self.suspended -= 1
        done = stock(trainer, *args, **kwargs)
        _read_all()
        return done

    def _read_first(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _read_all()
        return stock(*args, **kwargs)


OFF = f"or HF_MPS_SENTINELS=-{NonFinite.name} to go on regardless"


def refuse(args: Any, state: Any, logs: dict[str, Any] | None, advice: str) -> None:
    """Raise RunError where Trainer logs a loss or gradient norm that is no number, with `advice` what to do next.

    Under fp16 the losses alone count: a gradient norm may overflow there, and GradScaler skips that step.
    """
    watched = ("loss", "eval_loss") if args.fp16 else ("loss", "eval_loss", "grad_norm")
    for name in watched:
        value = (logs or {}).get(name)
        if isinstance(value, Real) and not math.isfinite(value):
            raise RunError(f"{name} is {value} at step {state.global_step} of {state.max_steps}; next: {advice}")


def _goes_on(arguments: Any) -> bool:
    return bool(said(arguments, FILTER) and getattr(arguments, FILTER, False))


def _callback(sentinel: NonFinite) -> Any:
    from transformers import TrainerCallback

    class StopOnNonFinite(TrainerCallback):  # type: ignore[misc]
        """Ends the run at the first logged loss or gradient norm that is no number; checkpoints stay as they are."""

        stops_on_non_finite = True

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
            if not sentinel.on:
                return
            try:
                refuse(args, state, logs, f"a lower learning_rate (now {args.learning_rate:g}), {OFF}")
            except RunError as error:
                sentinel.acted(str(error), aloud=False)
                raise

    return StopOnNonFinite()


def _read_all() -> None:
    from hf_mps.sentinels.stream import STREAM

    STREAM.read_all()


SENTINEL = NonFinite()
