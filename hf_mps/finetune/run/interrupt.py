"""Ctrl-C, SIGTERM or a closed terminal ends a training at the end of the step, with a checkpoint to resume from."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from transformers import TrainerCallback

from hf_mps.core.errors import INTERRUPTED
from hf_mps.distributed.agreement import Agreement
from hf_mps.distributed.ranks import Ranks
from hf_mps.guards.resume import loader_state
from hf_mps.guards.resume.rng_state import States

WAITS = b"hf-mps: stopping after this evaluation, which tells the best weights; Ctrl-C again stops at once\n"
SAID = b"\nhf-mps: stopping after this step, with a checkpoint; Ctrl-C again stops at once\n"
ONE = 2.0
"""Seconds within which several signals are one, where a launcher hands on what the terminal has sent too."""


class Stopped(KeyboardInterrupt):
    """Training was stopped from outside, after `step`; `exit_code` is what a shell reports for the signal."""

    def __init__(self, step: int, exit_code: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.step = step
        self.exit_code = exit_code


class Interruption(TrainerCallback):  # type: ignore[misc]
    """A context manager that remembers SIGINT, SIGTERM and SIGHUP, and a callback that then saves and raises Stopped.

    It acts at the end of a step or of an evaluation's batch, never inside: an exception from a signal handler would
    leave the step half done, and Python drops one that is raised inside a destructor. An evaluation that picks the best
    weights is finished first, or the resumed run would keep others. A second signal ends the run at once. A handler
    that the user's program set is left alone, and so is a thread other than the main one.

    Several processes act at the same step, whichever of them got the signal (hf_mps/distributed/agreement.py).
    """

    trainer: Any = None
    """Set once the trainer is made: it saves the checkpoint."""

    def __init__(self) -> None:
        ranks = Ranks.here()
        self._alone = ranks.world.alone
        self._replaced: dict[int, list[Any]] = {
            signal.SIGINT: [signal.default_int_handler],
            signal.SIGTERM: [signal.SIG_DFL],
            signal.SIGHUP: [signal.SIG_DFL],  # nohup ignores it, and so does the run
        }
        if ranks.watch is not None:
            self._replaced[signal.SIGTERM].append(ranks.watch.on_sigterm)
        self._agreement = Agreement(ranks.watch, _say if ranks.world.main else None)
        self._asked = 0.0  # when the first signal came here
        self._process = os.getpid()
        self._number: int | None = None  # of the signal, once the step is there
        self._before: dict[int, Any] = {}
        self._training = False
        self._evaluated: int | None = None
        self._waits = False
        self._states: States | None = None
        """Random states before an evaluation behind an epoch."""

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number, replaced in self._replaced.items():
                if signal.getsignal(number) in replaced:
                    self._before[number] = signal.signal(number, self._remember)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._agreement.close()
        while self._before:
            signal.signal(*self._before.popitem())

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if args.dataloader_num_workers > 0 and train_dataloader is not None:
            outlive(getattr(train_dataloader, "base_dataloader", train_dataloader))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = True
        if self._stops():
            control.should_save = True  # Trainer logs the step, saves, and calls on_save

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate and args.eval_strategy == "epoch":
            self._states = States.now(mps=args.device.type == "mps")
        if self._stops():
            control.should_save = True  # behind the evaluation, so that the checkpoint knows of it

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluated = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stops() and not self._awaits_evaluation(args, state):
            self._end(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = False
        if self._stops():
            self._end(state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if not self._stops():
            return
        if self._training and _decides(args):
            if not self._waits and Ranks.here().world.main:
                os.write(2, WAITS)
            self._waits = control.should_save = True
            return
        if self._training and self.trainer is not None:  # the weights are whole: an evaluation stands between steps
            self._leave_evaluation(train_dataloader)
            self.trainer._save_checkpoint(self.trainer.model, trial=None)
        self._end(state)

    def keep_before(self, evaluate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what `evaluate` does; where it fails, as for memory, the checkpoint that was due behind it is saved.

        The error is raised all the same.
        """
        trainer = self.trainer
        try:
            return evaluate(*args, **kwargs)
        except Exception:
            if self._training and self._alone and trainer.control.should_save:
                with suppress(Exception):  # the evaluation's error is the one to tell
                    self._leave_evaluation(trainer.callback_handler.train_dataloader)
                    trainer._save_checkpoint(trainer.model, trial=None)
            raise

    def _leave_evaluation(self, train_dataloader: Any) -> None:
        """Let a checkpoint be that of the training: MissedEvaluation evaluates from it again."""
        active = loader_state.active()
        if active is not None and loader_state.source_of(active) is not loader_state.source_of(train_dataloader):
            active.end()
        if self._states is not None:
            self._states.put()

    def _awaits_evaluation(self, args: Any, state: Any) -> bool:
        """Whether a checkpoint was saved after an epoch's last step and before that epoch's evaluation."""
        over = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
        to_come = args.eval_strategy == "epoch" and args.eval_delay <= (state.epoch or 0)
        return over and to_come and self._evaluated != state.global_step and _decides(args)

    def _end(self, state: Any) -> None:
        number, self._number = self._number, None
        assert number is not None
        raise Stopped(state.global_step, 128 + number if number != signal.SIGINT else INTERRUPTED)

    def _stops(self) -> bool:
        """Whether the run stops here: to be asked wherever it could, since ranks count these places."""
        if self._number is None:
            self._number = self._agreement.moment()
        return self._number is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader's worker, forked and signalled with the rest: it has to go on
            return
        now = time.monotonic()
        if number == signal.SIGHUP:
            _leave_terminal()
        # Of a closed terminal both the system and the shell may tell.
        if self._asked and number != signal.SIGHUP and (self._alone or now - self._asked > ONE):
            raise KeyboardInterrupt
        self._asked = self._asked or now
        self._agreement.ask(number)
        if self._alone:
            _say(number)


class Outlives:
    """A loader's `worker_init_fn`, behind which its worker pays no heed to a signal; it ends with the main process."""

    def __init__(self, stock: Any) -> None:
        self.stock = stock

    def __call__(self, worker: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if self.stock is not None:
            self.stock(worker)


def outlive(loader: Any) -> None:
    """Let the workers that `loader` starts from now on outlive a signal to the whole group of processes.

    A terminal sends Ctrl-C to all of them, torchrun SIGTERM: without its workers the run could not finish its step.
    """
    if not isinstance(loader.worker_init_fn, Outlives):
        loader.worker_init_fn = Outlives(loader.worker_init_fn)


def _leave_terminal() -> None:
    """Send what a closed terminal would show nowhere: each write to it fails, and would end the run before it saves."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for shown in (1, 2):
        if stat.S_ISCHR(os.fstat(shown).st_mode):
            os.dup2(nowhere, shown)
    os.close(nowhere)


def _say(number: int) -> None:
    if number == signal.SIGINT:
        os.write(2, SAID)  # not print: the signal may have come in the middle of one


def _decides(args: Any) -> bool:
    """Whether evaluations decide which weights are kept, or when the run ends."""
    return args.metric_for_best_model is not None
