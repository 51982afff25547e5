"""What is measured, and how long a step of it takes.

A case has a name, the size of its batch, and makes the work of a step on one device. The device's work is done before
the clock is read, the first steps do not count, medians do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune import tasks
from hf_mps.metal.device import memory
from hf_mps.tools.dryrun.resolve import Target, resolve_target

if TYPE_CHECKING:
    from hf_mps.tools.dryrun.modules import ModuleTracker

TRAINING, EVALUATION = "training", "evaluation"
QUICK_ROWS = 4
"""Rows of a recipe's batch with --quick, at most."""

Tick = Callable[[int], None]
"""Called after each step with its number, from 1; what it raises ends the steps."""
Phase = Callable[[int, Tick, Sequence[Any]], None]
"""Takes so many steps, with watchers around them."""


@dataclass(frozen=True)
class Work:
    """A model on a device with its batch. `phases` take the number of steps, a tick, and watchers around the steps.

    `size` is what is stored of the batch: its rows, what one of them is ("3 x 224 x 224"), and the model's parameters.
    `tracker` follows the modules of watched steps.
    """

    phases: Mapping[str, Phase]
    tracker: ModuleTracker
    model: Any
    batch: int
    row: str
    facts: Mapping[str, Choice[Any]]

    @property
    def size(self) -> dict[str, Any]:
        """Return the size of a step."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return {"batch": self.batch, "row": self.row, "parameters": parameters}


@dataclass(frozen=True)
class Case:
    """`make` gives the work for a device, and takes it away. It raises UserError for what cannot be run."""

    name: str
    make: Callable[[Choice[str]], AbstractContextManager[Work]]


def stepping(step: Callable[[], Any], tracker: ModuleTracker) -> Phase:
    """`step` as a phase of a work: called as often as asked for."""

    def steps(count: int, tick: Tick, watch: Sequence[Any] = ()) -> None:
        with ExitStack() as stack:
            for context in (tracker, *watch) if watch else ():
                stack.enter_context(context)
            for number in range(1, count + 1):
                step()
                tick(number)

    return steps


@contextmanager
def of_target(target: Target, quick: bool) -> Iterator[Case]:
    """A recipe or a model with a task, in real size with random weights over made-up rows, by the runner's own trainer.

    No hub is asked. Raises UserError where nothing tells the model's configuration, and what its task refuses.
    """
    from hf_mps.tools.dryrun import batch, prepare
    from hf_mps.tools.dryrun.step import model_errors

    with model_errors(target.resolved), prepare.weightless(target, "cpu") as parts:
        wide = batch.width(parts.whole, parts.prepared)

        @contextmanager
        def make(device: Choice[str]) -> Iterator[Work]:
            step = prepare.step(parts, device, fake=False, wide=wide)
            if quick and step.trainer.args.per_device_train_batch_size > QUICK_ROWS:
                prepare.shape_batches(step, parts.prepared, rows=QUICK_ROWS, wide=wide)
            yield _work(step, device.value)

        yield Case(target.name, make)


def _work(step: Any, device: str) -> Work:
    """The phases of a TrainingStep: the Trainer's own loop, and its own prediction of a batch without its loader."""

    def train(count: int, tick: Tick, watch: Sequence[Any] = ()) -> None:
        step.run(count, after_step=tick, watch=watch)

    def predict() -> None:
        step.model.eval()
        for each in step.batches:
            step.trainer.prediction_step(step.model, dict(each), prediction_loss_only=True)

    # Trainer moves it as it begins to train, and some trainers earlier.
    step.model.to(device)
    first, rows = _rows(step.batches[0]), sum(len(_rows(each)) for each in step.batches)
    row = counted(first.shape[1], "token") if first.ndim == 2 else " x ".join(map(str, first.shape[1:]))
    phases = {TRAINING: train, EVALUATION: stepping(predict, step.tracker)}
    return Work(phases, step.tracker, step.model, rows, row, step.facts)


def _rows(batch: Mapping[str, Any]) -> Any:
    """Return the tensor of a batch that the model reads: ids, pictures or sound."""
    read = ("input_ids", "pixel_values", "input_features", "input_values")
    tensors = {name: each for name, each in batch.items() if getattr(each, "ndim", 0) > 1}
    return next((tensors[name] for name in read if name in tensors), next(iter(tensors.values())))


def target_of(recipe: str | None, model: str | None, task: str | None, overrides: Sequence[str]) -> Target | None:
    """Return the user's case that the options name, or None for the field's. Imports no torch.

    Raises UserError where they contradict each other, and for what `resolve_target` refuses.
    """
    if recipe is not None and model is not None:
        raise UserError("--recipe cannot be combined with --model; give one of them")
    if recipe is not None and task is not None:
        raise UserError("--task cannot be combined with --recipe, which has a task; leave it out")
    if model is not None and task is None:
        raise UserError(f"--model needs a task; next: --task with one of {', '.join(tasks.names())}")
    if recipe is not None or model is not None:
        return resolve_target(str(recipe or model), overrides, task)
    if task is not None or overrides:
        given = "--task" if task is not None else f"'{overrides[0]}'"
        raise UserError(f"{given} needs a recipe or a model; next: --recipe RECIPE, or --model NAME --task TASK")
    return None


FEWEST = 3
"""Repetitions that are made however long they take; a median of fewer is none."""


@dataclass(frozen=True)
class Settings:
    """Steps that do not count, steps that do at most, and seconds after which no further one begins."""

    warm_up: int
    repetitions: int
    seconds: float


class _Enough(Exception):
    """Ends the steps early."""


def timed(
    phase: Phase, device: str, settings: Settings, batch: int, told: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Return the figures of a phase's steps of `batch` rows on `device`, as they are stored.

    `told` is called with the counted steps so far. A device whose memory is too small is a finding (`failure`), no
    error. Imports torch.
    """
    import torch

    peak, steps, mark = memory.Peak(device), list[float](), 0.0

    def tick(number: int) -> None:
        nonlocal mark
        # What was given to the device is done before the clock is read.
        if device != "cpu":
            getattr(torch, device).synchronize()
        now = time.perf_counter()
        if number > settings.warm_up:
            steps.append(now - mark)
        if len(steps) >= FEWEST and sum(steps) >= settings.seconds:
            raise _Enough
        told(len(steps))
        peak.sample()
        # Last, so that what is done between two steps is part of neither.
        mark = time.perf_counter()

    try:
        with peak, suppress(_Enough):
            phase(settings.warm_up + settings.repetitions, tick, ())
    except RuntimeError as error:
        if not (memory.refused(error) or type(error).__name__ == "OutOfMemoryError"):
            raise
        return {"failure": "its memory is too small for this batch"}
    median = statistics.median(steps)
    return {
        "seconds": round(median, 6),
        "fastest": round(min(steps), 6),
        "slowest": round(max(steps), 6),
        "repetitions": len(steps),
        "rows_per_second": round(batch / median, 3),
        "memory_bytes": peak.result.value,
        "memory_is": peak.result.reason,
    }
