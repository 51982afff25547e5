"""What a person sees of a run: the header of choices before it, its lines, and the closing table.

Boxed and coloured on a terminal, plain aligned lines otherwise. `step_lines` beside it prints training as it goes.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from hf_mps.core import status
from hf_mps.core.text import GIB, MIB, aligned, clock, duration, memory
from hf_mps.metrics.selection import of_log

if TYPE_CHECKING:
    from rich.console import Console

    from hf_mps.finetune.report.results import RunRecord


Rows = list[tuple[str, ...]]
DRAWN = "▲▼╭━"
WIDE = 100
"""Columns from which on reasons have a column of their own; in a narrower terminal each follows its value."""


def header(rows: Iterable[tuple[str, Any, str]], *, title: str = "hf_mps", stream: TextIO | None = None) -> None:
    """Print a run's choices: each row is a name, its value and the reason (may be empty). Default stream: stdout."""
    status.over()
    stream = stream or sys.stdout
    cells: Rows = [tuple(" ".join(str(cell).split()) for cell in row) for row in rows]
    if console := terminal(stream):
        _draw_header(console, title, cells)
        return
    say(stream, title)
    for line in aligned(cells):
        say(stream, f"  {line}")


def note(line: str, *, stream: TextIO | None = None, console: Console | None = None) -> None:
    """Print one line that a run did not ask for: a guard's action, a sentinel's finding. Default stream: stdout."""
    stream = stream or sys.stdout
    console = console or terminal(stream)
    if console is None:
        say(stream, f"note  {line}")
        return
    from rich.text import Text

    console.print(Text("note  ", style="yellow").append(line, style="default"))


def final_table(
    record: RunRecord,
    notes: Sequence[tuple[str, str]] = (),
    files: Sequence[str | Path] = (),
    stream: TextIO | None = None,
) -> None:
    """Print how a run ended: metrics against the baseline, what the training took, notes and files.

    Default stream: stdout.
    """
    stream, expectation = stream or sys.stdout, record.expectation
    base = record.baseline.metrics if record.baseline else {}
    cells: Rows = [
        (name, f"{value:.4f}", f"{base[name]:.4f}" if name in base else "") for name, value in record.metrics.items()
    ]
    cost = f"{duration(record.train_seconds)}, {record.samples_per_second:.1f} samples/s"
    cost += f", {memory(record.peak_memory)} at peak" if record.peak_memory is not None else ""
    below: Rows = [("baseline", record.baseline.what)] if record.baseline and base else []
    below += [("expected", str(expectation))] if expectation else []
    below += [("training", cost), *notes]
    below += [("written" if not index else "", str(file)) for index, file in enumerate(files)]
    if console := terminal(stream):
        _draw_final(console, cells, below, failed=expectation is not None and not expectation.met)
        return
    heads: Rows = [("metric", "this run", "baseline" if base else "")]
    for line in [*aligned(heads + cells, right=(1, 2)), *aligned(below)]:
        say(stream, line)


def comparison(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], files: Sequence[str], stream: TextIO | None = None
) -> None:
    """Print a table of runs under its title, and the files that hold it; a row may end in a remark."""
    stream = stream or sys.stdout
    wide = max((len(row) for row in rows), default=len(heads))
    heads = [*heads, *[""] * (wide - len(heads))]
    cells: Rows = [(*row, *[""] * (wide - len(row))) for row in rows]
    if console := terminal(stream):
        _draw_comparison(console, title, heads, cells)
    else:
        say(stream, title)
        for line in aligned([tuple(heads), *cells]):
            say(stream, line)
    for line in aligned([("written" if not index else "", file) for index, file in enumerate(files)]):
        say(stream, line)


def _draw_header(console: Console, title: str, rows: Rows) -> None:
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    narrow = console.width < WIDE
    grid.add_column(overflow="fold", max_width=None if narrow else console.width * 2 // 5)
    if not narrow:
        grid.add_column(style="dim", overflow="fold")
    for name, value, reason in rows:
        cells = [Text(name), Text(value, style="cyan")]  # Text, not str: a path may hold [brackets], rich's markup
        if narrow and reason:
            cells[1].append(f"  {reason}", style="dim default")
        grid.add_row(*cells, *([] if narrow else [Text(reason)]))
    console.print(Panel(grid, title=Text(title, style="bold"), title_align="left", border_style="dim", expand=False))


def _draw_comparison(console: Console, title: str, heads: Sequence[str], rows: Rows) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.ROUNDED, border_style="dim", header_style="dim")
    for head in heads:
        table.add_column(Text(head))
    for row in rows:
        table.add_row(*(Text(cell) for cell in row), style="bold" if row[-1] == "best" else "")
    console.print(table)


def _draw_final(console: Console, metrics: Rows, notes: Rows, *, failed: bool) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.ROUNDED, border_style="dim", header_style="dim")
    table.add_column("metric", style="bold")
    table.add_column("this run", justify="right", style="cyan")
    with_baseline = any(row[2] for row in metrics)
    if with_baseline:
        table.add_column("baseline", justify="right")
    for row in metrics:
        table.add_row(*(Text(cell) for cell in (row if with_baseline else row[:2])))
    console.print(table)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in notes:
        grid.add_row(name, Text(value, style="bold red" if failed and name == "expected" else ""))
    console.print(grid)


def takes(stream: TextIO, letters: str = DRAWN) -> bool:
    """Return whether the stream's encoding has a form for these letters; a stream that names none (StringIO) does."""
    try:
        letters.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def say(stream: TextIO, line: str) -> None:
    """Print one line whatever the stream's encoding."""
    if not takes(stream, line):
        encoding = stream.encoding
        line = line.encode(encoding, errors="replace").decode(encoding)
    with unread():
        print(line, file=stream, flush=True)


@contextlib.contextmanager
def unread() -> Iterator[None]:
    """Let a run go on whose reader went away (`| head`), or whose terminal was closed, which a signal tells it too."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno != errno.EIO:
            raise


def terminal(stream: TextIO) -> Console | None:
    """Return a rich console where the stream is a terminal that can draw, else None; rich itself honours NO_COLOR.

    FORCE_COLOR is not asked: in a log file a bar that redraws itself is litter.
    """
    if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown") or not takes(stream):
        return None
    from rich.console import Console

    return Console(file=cast(TextIO, _MayClose(stream)), highlight=False)


class _MayClose:
    """A terminal that may be closed while a run writes to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, words: str) -> int:
        with unread():
            self._stream.write(words)
        return len(words)

    def flush(self) -> None:
        with unread():
            self._stream.flush()


GAP = "  "
WIDEST = 160
"""Columns of a line in a log file: a tagger has measures for each of its classes, the closing table lists them."""


@dataclass(frozen=True)
class Field:
    """A piece of a line: its text, how soon it is dropped on a narrow terminal (0: never), and its arrow's colour."""

    text: str
    leave: int = 0
    colour: str = ""


@dataclass(frozen=True)
class Step:
    """The numbers of one training line; None drops the field. Memory in bytes, eta in seconds."""

    step: int
    total: int
    loss: float
    last_loss: float | None = None
    reward: float | None = None
    epoch: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    samples_per_second: float | None = None
    memory: int | None = None
    peak: int | None = None
    eta: float | None = None


def arrow(now: float, last: float | None, *, drawn: bool = True) -> str:
    """Return ▲ or ▼ (^ or v where those cannot be written) for a rise or fall, `=` for no change, a space at first."""
    if last is None or not math.isfinite(now) or not math.isfinite(last):
        return " "
    up, down = "▲▼" if drawn else "^v"
    return up if now > last else down if now < last else "="


def step_fields(row: Step, *, drawn: bool = True) -> list[Field]:
    """Return the fields of a training line, left to right."""
    colour = _judge(row.loss, row.last_loss, greater_is_better=False)
    fields = [Field(_progress("step", row.step, row.total))]
    if row.epoch is not None:
        fields.append(Field(f"epoch {row.epoch:5.2f}", leave=2))
    fields.append(Field(f"loss {row.loss:7.4f} {arrow(row.loss, row.last_loss, drawn=drawn)}", colour=colour))
    if row.reward is not None:
        fields.append(Field(f"reward {row.reward:.4f}"))
    if row.learning_rate is not None:
        fields.append(Field(f"lr {row.learning_rate:.2e}", leave=3))
    if row.grad_norm is not None:
        small = abs(row.grad_norm) < 10_000 or not math.isfinite(row.grad_norm)
        fields.append(Field(f"grad {row.grad_norm:{'7.2f' if small else '7.1e'}}", leave=1))
    if row.samples_per_second is not None:
        fields.append(Field(f"{row.samples_per_second:6.1f} samples/s", leave=5))
    if row.memory is not None:
        small = max(row.memory, row.peak or 0) < GIB / 10
        size, unit, digits = (MIB, "MiB", 0) if small else (GIB, "GiB", 2)
        peak = f"/{row.peak / size:.{digits}f}" if row.peak is not None else ""
        fields.append(Field(f"{row.memory / size:.{digits}f}{peak} {unit}", leave=4))
    if row.eta is not None:
        fields.append(Field(f"eta {clock(row.eta)}", leave=6))
    return fields


def eval_fields(
    logs: Mapping[str, object],
    last: Mapping[str, object],
    *,
    step: int,
    total: int,
    main_metric: str | None = None,
    greater_is_better: bool = True,
    drawn: bool = True,
) -> list[Field]:
    """Return the fields of an evaluation line from Trainer's log of it and the previous evaluation's log (or {})."""
    fields = [Field(_progress("eval", step, total))]
    if isinstance(epoch := logs.get("epoch"), (int, float)):
        fields.append(Field(f"epoch {epoch:5.2f}", leave=2))
    measures = evaluated(logs)
    for name in sorted(measures, key=lambda name: (name != "loss", name != main_metric)):
        value = measures[name]
        before, wide = last.get(f"eval_{name}"), "7.4f" if name == "loss" else ".4f"
        earlier = float(before) if isinstance(before, (int, float)) else None
        if name in ("loss", main_metric):
            colour = _judge(value, earlier, greater_is_better=greater_is_better and name != "loss")
            fields.append(Field(f"{name} {value:{wide}} {arrow(value, earlier, drawn=drawn)}", colour=colour))
        else:
            fields.append(Field(f"{name} {value:.4f}", leave=1))
    if isinstance(seconds := logs.get("eval_runtime"), (int, float)):
        fields.append(Field(f"{seconds:.1f} s", leave=3))
    return fields


def evaluated(logs: Mapping[str, object]) -> dict[str, float]:
    """Return the metrics of an evaluation's log, without `eval_`, loss first."""
    metrics = of_log(logs)
    return {name: float(metrics[name]) for name in sorted(metrics, key=lambda name: name != "loss")}


def fit(fields: list[Field], width: int | None) -> list[Field]:
    """Return the fields that fit into `width` columns (None: no limit); the least important are dropped first."""
    kept = list(fields)
    while width is not None and len(line(kept)) > width and any(field.leave for field in kept):
        # Among equals the last goes first: overall metrics stand before those of a class.
        kept.remove(min((field for field in reversed(kept) if field.leave), key=lambda field: field.leave))
    return kept


def line(fields: list[Field]) -> str:
    """Return the fields as one line of plain text."""
    return GAP.join(field.text for field in fields).rstrip()


def _progress(kind: str, step: int, total: int) -> str:
    return f"{kind} {step:>{len(str(total))}}/{total}" if total else kind


def _judge(now: float, last: float | None, *, greater_is_better: bool) -> str:
    if not math.isfinite(now):
        return "bold red"
    if last is None or now == last or not math.isfinite(last):
        return ""
    return "green" if (now > last) == greater_is_better else "yellow"
