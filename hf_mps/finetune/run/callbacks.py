"""Callbacks that the runner adds to Trainer: stop at a NaN loss, time the training alone, keep processes alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_mps.core.errors import RunError
from hf_mps.layer.guards.sentinels.numbers import refuse


def lower_rate(now: float) -> str:
    """Return what to do about a loss that is NaN or infinite, in a recipe's words."""
    return f"a lower training.learning_rate (now {now:g}), or training.max_grad_norm=1"


class FiniteLoss(TrainerCallback):  # type: ignore[misc]
    """Stops the run (RunError) at the first logged loss or gradient norm that is NaN or infinite.

    Works on every device; the sentinel, which `stages.train` lets stop the run too, sees what is not logged.
    """

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **given: Any) -> None:
        refuse(args, state, logs, lower_rate(args.learning_rate), given.get("optimizer"))


def finish(device: Any) -> None:
    """Wait for what was sent to a CUDA device: steps that do not wait for it are not over when their calls return."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stored(TrainerCallback, ExportableState):  # type: ignore[misc]
    """A callback whose attributes each checkpoint stores among the callbacks' states (trainer_state.json)."""

    def state(self) -> dict[str, Any]:
        """Return the attributes as Trainer stores them."""
        return {"args": {}, "attributes": {name: value for name, value in self.__dict__.items() if name[0] != "_"}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        name = type(self).__name__
        if state.global_step and (stored := state.stateful_callbacks.get(name)):
            self.__dict__.update(stored["attributes"])
        state.stateful_callbacks[name] = self.state()  # Trainer saves only the callbacks listed there


class Stopwatch(Stored):
    """Seconds of training steps, without evaluations and checkpoints, over every part of a stopped and resumed run.

    Each checkpoint stores the seconds, so that a kill loses only those after the last one. They count from
    `first_step`: above 0 where a checkpoint stores none.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.first_step = 0
        self._mark = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds, self.first_step = 0.0, state.global_step
        super().on_train_begin(args, state, control)
        self._mark = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_evaluate or control.should_save or control.should_training_stop:
            finish(args.device)
        self._look()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        finish(args.device)
        self._look()

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._mark = time.perf_counter()

    on_save = on_evaluate

    def _look(self) -> None:
        now = time.perf_counter()
        self.seconds += now - self._mark
        self._mark = now


class Shares(Stored):
    """Stores in each checkpoint how the run's first process group shared a step."""

    # Defaults, since Trainer makes an object without arguments before it restores the state (ExportableState).
    def __init__(self, processes: int = 1, batch: int = 0, accumulation: int = 1) -> None:
        self.processes = processes
        self.batch = batch
        """Rows of a process in one forward pass."""
        self.accumulation = accumulation

    @property
    def rows(self) -> int:
        """Rows of a step of all processes."""
        return self.processes * self.batch * self.accumulation

    @classmethod
    def of(cls, args: Any) -> Shares:
        """Return those of transformers' TrainingArguments."""
        return cls(args.world_size, args.train_batch_size, args.gradient_accumulation_steps)

    @classmethod
    def stored(cls, state: dict[str, Any]) -> Shares | None:
        """Return those of a checkpoint's trainer_state.json; None for one of an earlier release."""
        found = (state.get("stateful_callbacks") or {}).get(cls.__name__)
        return cls(**found["attributes"]) if found else None


class OwnDraws(TrainerCallback):  # type: ignore[misc]
    """Seeds each of several processes differently, from the run's seed and the rank.

    Trainer seeds all of them alike, for equal weights, and their rows would have one dropout mask. A run that resumes
    gets each rank's own state from its checkpoint afterwards; the order of the rows has its own generator.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.world_size > 1:
            torch.manual_seed(args.seed + args.process_index)


class MainStatistics(TrainerCallback):  # type: ignore[misc]
    """Gives every process the main one's statistics of batch norms before an evaluation, as the saved model has them.

    DDP shares them before each step, and in the step each process takes in its own rows.
    """

    def on_step_end(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
        if control.should_evaluate or control.should_training_stop:
            self.on_epoch_end(args, state, control, **settings)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if args.world_size == 1:
            return
        for module in model.modules():
            # The base of all batch norms, of SyncBatchNorm too.
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                for statistic in module.buffers():
                    torch.distributed.broadcast(statistic, 0)


class FolderKept(TrainerCallback):  # type: ignore[misc]
    """Ends a run whose folder was deleted (RunError), once the next checkpoint is in a new one.

    `inside` is a folder that the run's own holds until it ends; `store` writes what makes the new one the run's. A run
    that writes no more checkpoints goes on to its end.
    """

    def __init__(self, inside: Path, store: Callable[[], None]) -> None:
        self._inside, self._store, self._deleted = inside, store, False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        over = state.global_step >= state.max_steps
        if (control.should_save or over) and not self._inside.is_dir():
            self._inside.mkdir(parents=True)
            self._store()
            self._deleted = not over

    on_epoch_end = on_step_end

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._deleted:
            raise RunError(f"{self._inside.parent} was deleted during the run; next: the same command, which goes on")


class BeforeFirstStep(TrainerCallback):  # type: ignore[misc]
    """Calls `make_up` when a run resumes between two steps, or behind its last one."""

    def __init__(self, make_up: Callable[[], None]) -> None:
        self._make_up = make_up

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.eval_strategy == "steps" or state.global_step >= state.max_steps:
            self._make_up()


class Epochs(TrainerCallback):  # type: ignore[misc]
    """Calls `begin` with each epoch's number before a row is read, also for the epoch in which a run resumes."""

    def __init__(self, begin: Callable[[int], None]) -> None:
        self._begin = begin

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begin(int(state.epoch or 0))  # a fraction where the run resumes within an epoch
