"""One line for each logging step and each evaluation, and a bar below them on a terminal."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import is_in_notebook

from hf_mps.core.text import GIB, MIB, clock
from hf_mps.finetune.report.screen import GAP, note, say, takes, terminal
from hf_mps.metrics.selection import of_log

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


WIDEST = 160
"""Columns of a line in a log file; the closing table has the metrics that are cut off, of a tagger's every class."""


class Field(NamedTuple):
    """A piece of a line: its text, how early a narrow terminal drops it (0: never), and its colour."""

    text: str
    leave: int = 0
    colour: str = ""


@dataclass(kw_only=True, eq=False)
class StepLines(TrainerCallback):  # type: ignore[misc]
    """Prints training as it goes; use it as a context manager, so that Ctrl-C leaves the terminal as it was.

    `memory()` returns (bytes now, bytes at peak); `clock` is in seconds. Each training entry of the
    Trainer's log_history gains `samples_per_second`, `memory_bytes`, `peak_memory_bytes`. Samples per second exclude
    the time of evaluations and checkpoints; the ETA includes it.
    """

    memory: Callable[[], tuple[int, int]] | None = None
    main_metric: str | None = None
    greater_is_better: bool = True
    stream: TextIO = field(default_factory=lambda: sys.stdout)
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._console, self._drawn = terminal(self.stream), takes(self.stream)
        self._quiet = False
        self._last_loss: float | None = None
        self._last_eval: dict[str, Any] = {}
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._eval_task: TaskID | None = None
        self._begun = self._mark = self.clock()
        self._first_step = self._logged_step = 0
        self._trained = 0.0  # seconds in training steps since the last line

    def attach(self, trainer: Any) -> StepLines:
        """Replace Trainer's printer or tqdm bar, and return self. A notebook shows Trainer's own table instead."""
        for theirs in (PrinterCallback, ProgressCallback):
            trainer.pop_callback(theirs)
        trainer.add_callback(self)
        if is_in_notebook():
            from transformers.utils.notebook import NotebookProgressCallback

            trainer.add_callback(NotebookProgressCallback)
            self._quiet, self._console = True, None
        return self

    def __enter__(self) -> StepLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def note(self, line: str) -> None:
        """Print a guard's action or a sentinel's finding, above the bar if there is one."""
        note(line, stream=self.stream, console=self._console)

    def close(self) -> None:
        """Remove the bar from the terminal; safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = self._eval_task = None

    # Trainer's events, in the order in which they come.

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._begun = self._mark = self.clock()
        self._first_step = self._logged_step = state.global_step  # above 0 where a run is resumed
        self._trained = 0.0
        if self._console is not None and state.is_world_process_zero:
            self._open_bar(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = self.clock()
        self._trained += now - self._mark
        self._mark = now
        if self._bar is not None and self._task is not None:
            done, took = state.global_step - self._first_step, now - self._begun
            rate = f"{done / took:.2f} steps/s" if took > 0 else ""
            eta = clock(self._eta(state) or 0.0)
            self._bar.update(self._task, completed=state.global_step, rate=rate, eta=f"eta {eta}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "loss" in logs:
            self._log_step(args, state, logs)
        elif of_log(logs):
            self._log_evaluation(state, logs)

    def on_prediction_step(self, args: Any, state: Any, control: Any, eval_dataloader: Any = None, **_: Any) -> None:
        if self._bar is None:
            return
        if self._eval_task is None:
            try:
                batches = len(eval_dataloader)
            except TypeError:  # a streamed data set has no length
                batches = None
            self._eval_task = self._bar.add_task("evaluating", total=batches, rate="", eta="")
        self._bar.advance(self._eval_task)

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._bar is not None and self._eval_task is not None:
            self._bar.remove_task(self._eval_task)
        self._eval_task = None
        self._mark = self.clock()

    on_predict = on_evaluate

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._mark = self.clock()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.close()

    # What they print.

    def _log_step(self, args: Any, state: Any, logs: dict[str, Any]) -> None:
        used = self.memory() if self.memory is not None else None
        steps = state.global_step - self._logged_step
        samples = steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        rate = samples / self._trained if self._trained > 0 and samples > 0 else None
        loss, norm = float(logs["loss"]), logs.get("grad_norm")
        fields = self._beginning("step", state, logs)
        # A loss of -1e-9, as of GRPO's first steps, is written without the sign of its rounded zero.
        fields.append(self._judged(f"loss {round(loss, 4) + 0.0:7.4f}", loss, self._last_loss, greater_is_better=False))
        if logs.get("reward") is not None:
            fields.append(Field(f"reward {logs['reward']:.4f}"))
        if logs.get("learning_rate") is not None:
            fields.append(Field(f"lr {logs['learning_rate']:.2e}", leave=3))
        if norm is not None:
            small = abs(norm) < 10_000 or not math.isfinite(norm)
            fields.append(Field(f"grad {norm:{'7.2f' if small else '7.1e'}}", leave=1))
        if rate is not None:
            fields.append(Field(f"{rate:6.1f} samples/s", leave=5))
        if used is not None:
            size, unit, digits = (MIB, "MiB", 0) if max(used) < GIB / 10 else (GIB, "GiB", 2)
            fields.append(Field(f"{used[0] / size:.{digits}f}/{used[1] / size:.{digits}f} {unit}", leave=4))
        if (eta := self._eta(state)) is not None:
            fields.append(Field(f"eta {clock(eta)}", leave=6))
        # The report plots memory and throughput over the steps; checkpoints keep them in log_history.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            memory, peak = used or (None, None)
            values = {"samples_per_second": rate, "memory_bytes": memory, "peak_memory_bytes": peak}
            state.log_history[-1].update({name: value for name, value in values.items() if value is not None})
        self._last_loss, self._logged_step, self._trained = loss, state.global_step, 0.0
        self._show(state, fields)

    def _log_evaluation(self, state: Any, logs: dict[str, Any]) -> None:
        fields, measures, last = self._beginning("eval", state, logs), of_log(logs), of_log(self._last_eval)
        for name in sorted(measures, key=lambda name: (name != "loss", name != self.main_metric)):
            value = measures[name]
            if name in ("loss", self.main_metric):
                words = f"{name} {value:{'7.4f' if name == 'loss' else '.4f'}}"
                greater = self.greater_is_better and name != "loss"
                fields.append(self._judged(words, value, last.get(name), greater_is_better=greater))
            else:
                fields.append(Field(f"{name} {value:.4f}", leave=1))
        if "eval_runtime" in logs:
            fields.append(Field(f"{logs['eval_runtime']:.1f} s", leave=3))
        self._last_eval = dict(logs)
        self._show(state, fields)

    def _beginning(self, kind: str, state: Any, logs: dict[str, Any]) -> list[Field]:
        """Return how far the training has come."""
        total = state.max_steps
        fields = [Field(f"{kind} {state.global_step:>{len(str(total))}}/{total}" if total else kind)]
        return fields if logs.get("epoch") is None else [*fields, Field(f"epoch {logs['epoch']:5.2f}", leave=2)]

    def _judged(self, words: str, now: float, last: float | None, *, greater_is_better: bool) -> Field:
        """Return the field of a value, with ▲ or ▼ (^ or v where the stream cannot write those), or = for no change."""
        if not math.isfinite(now) or last is None or not math.isfinite(last):
            return Field(f"{words}  ", colour="" if math.isfinite(now) else "bold red")
        if now == last:
            return Field(f"{words} =")
        arrow = ("▼▲" if self._drawn else "v^")[now > last]
        return Field(f"{words} {arrow}", colour="green" if (now > last) == greater_is_better else "yellow")

    def _eta(self, state: Any) -> float | None:
        done = state.global_step - self._first_step
        if done <= 0 or state.max_steps <= 0:
            return None
        return float((self.clock() - self._begun) / done * (state.max_steps - state.global_step))

    def _show(self, state: Any, fields: list[Field]) -> None:
        if self._quiet or not state.is_world_process_zero:
            return
        width, kept = self._console.width if self._console else WIDEST, list(fields)
        while len(_line(kept)) > width and any(field.leave for field in kept):
            # The least important goes first, and the last of equals: a class's metrics follow the overall ones.
            kept.remove(min((field for field in reversed(kept) if field.leave), key=lambda field: field.leave))
        if self._console is None:
            say(self.stream, _line(kept))
            return
        from rich.text import Text

        texts = [Text(field.text, style=field.colour) for field in kept]
        self._console.print(Text(GAP).join(texts), no_wrap=True, overflow="crop", soft_wrap=False)

    def _open_bar(self, state: Any) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="cyan"),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TextColumn("{task.fields[eta]}", style="dim"),
            console=self._console,
            transient=True,  # the lines above remain
            expand=True,
        )
        counts = {"total": state.max_steps, "completed": state.global_step}
        self._task = self._bar.add_task("training", **counts, rate="", eta="eta --:--")
        self._bar.start()


def _line(fields: list[Field]) -> str:
    """Return the fields as one line of plain text."""
    return GAP.join(field.text for field in fields).rstrip()
