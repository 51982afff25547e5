"""Ctrl-C or SIGTERM ends a training at the end of the step, with a checkpoint to resume from."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from transformers import TrainerCallback

from hf_mps.core.errors import INTERRUPTED

WAITS = b"hf-mps: stopping after this evaluation, which tells the best weights; Ctrl-C again stops at once\n"
SAID = b"\nhf-mps: stopping after this step, with a checkpoint; Ctrl-C again stops at once\n"


class Stopped(KeyboardInterrupt):
    """Training was stopped from outside, after `step`; `exit_code` is what a shell reports for the signal."""

    def __init__(self, step: int, exit_code: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.step = step
        self.exit_code = exit_code


class Interruption(TrainerCallback):  # type: ignore[misc]
    """A context manager that remembers SIGINT and SIGTERM, and a callback that then saves and raises Stopped.

    It acts at the end of a step or of an evaluation's batch, never inside: an exception from a signal handler would
    leave the step half done, and Python drops one that is raised inside a destructor. An evaluation that picks the best
    weights is finished first, or the resumed run would keep others. A second signal ends the run at once. A handler
    that the user's program set is left alone, and so is a thread other than the main one.
    """

    trainer: Any = None
    """Set once the trainer is made: it saves the checkpoint."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._before: dict[int, Any] = {}
        self._training = False
        self._evaluated: int | None = None
        self._waits = False

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number, own in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
                if signal.getsignal(number) is own:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._before:
            signal.signal(*self._before.popitem())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = True
        if self._number is not None:
            control.should_save = True  # Trainer logs the step, saves, and calls on_save

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._number is not None:
            control.should_save = True  # behind the evaluation, so that the checkpoint knows of it

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluated = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._number is not None and not self._awaits_evaluation(args, state):
            self._end(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = False
        if self._number is not None:
            self._end(state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._number is None:
            return
        if self._training and _decides(args):
            if not self._waits:
                os.write(2, WAITS)
            self._waits = control.should_save = True
            return
        if self._training and self.trainer is not None:  # the weights are whole: an evaluation stands between steps
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
        self._end(state)

    def _awaits_evaluation(self, args: Any, state: Any) -> bool:
        """Whether a checkpoint was saved after an epoch's last step and before that epoch's evaluation."""
        over = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
        to_come = args.eval_strategy == "epoch" and args.eval_delay <= (state.epoch or 0)
        return over and to_come and self._evaluated != state.global_step and _decides(args)

    def _end(self, state: Any) -> None:
        number, self._number = self._number, None
        assert number is not None
        raise Stopped(state.global_step, 128 + number if number != signal.SIGINT else INTERRUPTED)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self._number is not None:
            raise KeyboardInterrupt
        self._number = number
        if number == signal.SIGINT:
            os.write(2, SAID)  # not print: the signal may have come in the middle of one


def _decides(args: Any) -> bool:
    """Whether evaluations decide which weights are kept, or when the run ends."""
    return args.metric_for_best_model is not None
