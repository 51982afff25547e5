"""One line for each logging step and each evaluation, and a bar below them on a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from transformers import PrinterCallback, ProgressCallback, TrainerCallback
from transformers.utils import is_in_notebook

from hf_mps.core import text
from hf_mps.finetune.report import screen
from hf_mps.finetune.report.screen import note, say, takes, terminal

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


Memory = Callable[[], "tuple[int, int | None] | None"]


@dataclass(kw_only=True, eq=False)
class StepLines(TrainerCallback):  # type: ignore[misc]
    """Prints training as it goes; use it as a context manager, so that Ctrl-C leaves the terminal as it was.

    `memory()` returns (bytes now, bytes at peak or None) or None; `clock` is in seconds. Each training entry of the
    Trainer's log_history gains `samples_per_second`, `memory_bytes`, `peak_memory_bytes`. Samples per second exclude
    the time of evaluations and checkpoints; the ETA includes it.
    """

    memory: Memory | None = None
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
            eta = text.clock(self._eta(state) or 0.0)
            self._bar.update(self._task, completed=state.global_step, rate=rate, eta=f"eta {eta}")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        logs = logs or {}
        if "loss" in logs:
            self._log_step(args, state, logs)
        elif screen.evaluated(logs):
            better: dict[str, Any] = {"main_metric": self.main_metric, "greater_is_better": self.greater_is_better}
            at = {"step": state.global_step, "total": state.max_steps, "drawn": self._drawn}
            fields = screen.eval_fields(logs, self._last_eval, **better, **at)
            self._last_eval = dict(logs)
            self._show(state, fields)

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
        at = {"step": state.global_step, "total": state.max_steps, "drawn": self._drawn}
        fields = screen.step_fields(logs, self._last_loss, rate=rate, used=used, eta=self._eta(state), **at)
        # The report plots memory and throughput over the steps; checkpoints keep them in log_history.
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            memory, peak = used or (None, None)
            values = {"samples_per_second": rate, "memory_bytes": memory, "peak_memory_bytes": peak}
            state.log_history[-1].update({name: value for name, value in values.items() if value is not None})
        self._last_loss, self._logged_step, self._trained = float(logs["loss"]), state.global_step, 0.0
        self._show(state, fields)

    def _eta(self, state: Any) -> float | None:
        done = state.global_step - self._first_step
        if done <= 0 or state.max_steps <= 0:
            return None
        return float((self.clock() - self._begun) / done * (state.max_steps - state.global_step))

    def _show(self, state: Any, fields: list[screen.Field]) -> None:
        if self._quiet or not state.is_world_process_zero:
            return
        if self._console is None:
            say(self.stream, screen.line(screen.fit(fields, screen.WIDEST)))
            return
        from rich.text import Text

        shown = screen.fit(fields, self._console.width)
        texts = [Text(field.text, style=field.colour) for field in shown]
        self._console.print(Text(screen.GAP).join(texts), no_wrap=True, overflow="crop", soft_wrap=False)

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
