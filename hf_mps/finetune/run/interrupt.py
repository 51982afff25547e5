"""Ctrl-C, SIGTERM or a closed terminal ends a training at the end of the step, with a checkpoint to resume from."""

from __future__ import annotations

import os
import signal
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from hf_mps.core.errors import INTERRUPTED
from hf_mps.distributed.ranks import Ranks, open_store
from hf_mps.distributed.voice import on_sigterm
from hf_mps.distributed.world import World
from hf_mps.finetune.run.callbacks import finish
from hf_mps.layer.guards.resume import batches
from hf_mps.layer.guards.resume.random_numbers import States

WAITS = b"hf-mps: stopping after this evaluation, which tells the best weights; Ctrl-C again stops at once\n"
SAID = b"\nhf-mps: stopping after this step, with a checkpoint; Ctrl-C again stops at once\n"
LOOK = 0.2
"""Seconds between two looks for a signal that another rank got."""
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

    Several processes act at the same step, whichever of them got the signal (Agreement).
    """

    trainer: Any = None
    """Set once the trainer is made: it saves the checkpoint."""

    def __init__(self) -> None:
        self._alone = Ranks.here().world.alone
        self._replaced: dict[int, list[Any]] = {
            signal.SIGINT: [signal.default_int_handler],
            signal.SIGTERM: [signal.SIG_DFL] if self._alone else [signal.SIG_DFL, signal.SIG_IGN, on_sigterm],
            signal.SIGHUP: [signal.SIG_DFL],  # nohup ignores it, and so does the run
        }
        self._agreement = Agreement(Ranks.here())
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

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._agreement.close()
        while self._before:
            number, before = self._before.popitem()
            # A launcher sends SIGTERM at the first failure; this process has to say how it ends.
            failed = kind is not None and not self._alone and number == signal.SIGTERM
            signal.signal(number, signal.SIG_IGN if failed else before)

    def on_train_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if args.dataloader_num_workers > 0 and train_dataloader is not None:
            outlive(getattr(train_dataloader, "base_dataloader", train_dataloader))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = True
        if self._stops(args.device):
            control.should_save = True  # Trainer logs the step, saves, and calls on_save

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate and args.eval_strategy == "epoch":
            self._states = States.now(mps=args.device.type == "mps")
        if self._stops():
            control.should_save = True  # behind the evaluation, so that the checkpoint knows of it

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._evaluated = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A checkpoint behind an epoch's last step may come before that epoch's evaluation, which decides.
        over = float(state.epoch or 0).is_integer() or state.global_step >= state.max_steps
        to_come = args.eval_strategy == "epoch" and args.eval_delay <= (state.epoch or 0)
        awaits = over and to_come and self._evaluated != state.global_step and args.metric_for_best_model is not None
        if self._stops() and not awaits:
            self._end(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._training = False
        if self._stops():
            self._end(state)

    def on_prediction_step(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        if not self._stops(args.device):
            return
        if self._training and args.metric_for_best_model is not None:  # it decides which weights are kept
            if not self._waits and Ranks.here().world.main:
                os.write(2, WAITS)
            self._waits = control.should_save = True
            return
        if self._training and self.trainer is not None:  # between two steps, so the weights are whole
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
        """Let a checkpoint be that of the training: `RecipeTrainer` evaluates from it again."""
        active = batches.active()
        if active is not None and batches.source_of(active) is not batches.source_of(train_dataloader):
            active.end()
        if self._states is not None:
            self._states.put()

    def _end(self, state: Any) -> None:
        number, self._number = self._number, None
        assert number is not None
        raise Stopped(state.global_step, 128 + number if number != signal.SIGINT else INTERRUPTED)

    def _stops(self, device: Any = None) -> bool:
        """Whether the run stops here. Several ranks decide it where a `device` is given: behind a collective of all."""
        if self._number is None and (self._alone or device is not None):
            self._number = self._agreement.moment(device)
        return self._number is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader's worker, forked and signalled with the rest: it has to go on
            return
        now = time.monotonic()
        if number == signal.SIGHUP:
            # Each write to a closed terminal fails, and would end the run before it saves.
            nowhere = os.open(os.devnull, os.O_RDWR)
            for shown in (1, 2):
                if stat.S_ISCHR(os.fstat(shown).st_mode):
                    os.dup2(nowhere, shown)
            os.close(nowhere)
        # Both the system and the shell may report a closed terminal, so a second SIGHUP is no second request.
        if self._asked and number != signal.SIGHUP and (self._alone or now - self._asked > ONE):
            raise KeyboardInterrupt
        self._asked = self._asked or now
        self._agreement.ask(number)
        if self._alone:
            _say(number)


class Agreement:
    """The moment at which all ranks stop, whichever of them got a signal; alone the one that follows it.

    A moment is the end of a step or of an evaluation's batch, which all ranks reach through a collective. Each rank
    reports the moment at which it knows of the signal. All stop one moment after the latest report: whoever gets there
    went through a collective that no rank entered before it had reported. A thread looks for the signal in the
    launcher's store, over its own connection: one whose machine sleeps never answers, and no step waits for it.
    """

    _number = count()

    def __init__(self, ranks: Ranks, connect: Callable[[World], Any] = open_store) -> None:
        self._ranks, self._connect = ranks, connect
        self._key = f"stop/{next(self._number)}"  # the runs of a sweep come one after the other, on every rank
        self._asked: int | None = None
        self._signal: int | None = None  # that somebody got
        self._failure: Exception | None = None
        self._passed = 0
        self._reported = False
        self._closed = threading.Event()
        if not ranks.world.alone:
            threading.Thread(target=self._listen, daemon=True).start()

    def ask(self, number: int) -> None:
        """Ask all ranks to stop; called by a signal's handler."""
        self._asked = number

    def close(self) -> None:
        """Look for no signal any more."""
        self._closed.set()

    def moment(self, device: Any) -> int | None:
        """Return the number of the signal where all ranks stop here, else None. Raises DistError without a store."""
        ranks, self._passed = self._ranks, self._passed + 1
        if ranks.world.alone:
            return self._asked
        if self._failure is not None:
            raise self._failure
        if self._signal is None:
            return None
        if not self._reported:
            ranks.store.set(f"{self._key}/{ranks.world.rank}", str(self._passed))
            self._reported = True
            if ranks.world.main:
                _say(self._signal)
            return None
        finish(device)  # CUDA queues collectives: the process may be ahead of them
        reports = [f"{self._key}/{rank}" for rank in range(ranks.world.size)]
        if not ranks.store.check(reports):
            return None
        return self._signal if self._passed > max(int(ranks.store.get(one)) for one in reports) else None

    def _listen(self) -> None:
        try:
            store = self._connect(self._ranks.world)
            while not self._closed.wait(LOOK):
                if self._asked is not None:
                    # An empty text stands for a key that nobody has set: the first signal is kept.
                    store.compare_set(self._key, "", str(self._asked))
                if store.check([self._key]):
                    self._signal = int(store.get(self._key))
                    return
        except Exception as error:  # the launcher, or the machine with the store, is gone
            self._failure = error


def outlive(loader: Any) -> None:
    """Let the workers that `loader` starts from now on outlive a signal to the whole group of processes.

    A terminal sends Ctrl-C to all of them, torchrun SIGTERM: without its workers the run could not finish its step.
    They end with the main process.
    """
    loader.worker_init_fn = partial(_ignoring_signals, loader.worker_init_fn)


def _ignoring_signals(stock: Callable[[int], None] | None, worker: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if stock is not None:
        stock(worker)


def _say(number: int) -> None:
    if number == signal.SIGINT:
        os.write(2, SAID)  # not print: the signal may have come in the middle of one
