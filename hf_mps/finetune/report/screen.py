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
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TextIO, cast

from hf_mps.core import status
from hf_mps.core.text import GIB, MIB, aligned, clock, duration, memory
from hf_mps.finetune.report.verdict import closing_line
from hf_mps.metrics.selection import of_log

if TYPE_CHECKING:
    from rich.console import Console

    from hf_mps.finetune.report.results import RunRecord


Rows = list[tuple[str, ...]]
DRAWN = "▲▼╭━"
FRAME = 4
"""Columns that the box around a header takes, or in a file the indentation."""
GAP = "  "


def header(
    rows: Iterable[tuple[str, Any, str]], *, title: str = "hf_mps", brief: bool = False, stream: TextIO | None = None
) -> None:
    """Print a run's choices: each row is a name, its value and the reason (may be empty). Default stream: stdout.

    A `brief` header has one line a row: as wide as the terminal, 80 columns in a file.
    """
    status.over()
    stream = stream or sys.stdout
    cells: Rows = [tuple(" ".join(str(cell).split()) for cell in row) for row in rows]
    console = terminal(stream)
    if brief:
        cells = _one_line_each(cells, (console.width if console else 80) - FRAME)
    if console:
        _draw_header(console, title, cells)
        return
    say(stream, title)
    if brief:
        cells = [(name, GAP.join(filter(None, rest))) for name, *rest in cells]
    for line in aligned(cells):
        say(stream, f"  {line}")


def _one_line_each(rows: Rows, width: int) -> Rows:
    """Return the rows with values and reasons cut, so that name, value and reason fit into `width` columns."""
    width -= max(len(name) for name, *_ in rows) + len(GAP)
    cut: Rows = []
    for name, value, reason in rows:
        if len(value) > width:
            value = f"{value[: width - 1]}…"
        # shorten drops whole words, and leaves the placeholder alone where not even the first one fits.
        reason = shorten(reason, max(1, width - len(value) - len(GAP)), placeholder="…")
        cut.append((name, value, reason.strip("…") and reason))
    return cut


def note(line: str, *, stream: TextIO | None = None, console: Console | None = None) -> None:
    """Print a guard's action or a sentinel's finding as one line. Default stream: stdout."""
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
    files: Sequence[Path] = (),
    commands: Sequence[str] = (),
    stream: TextIO | None = None,
) -> None:
    """Print the end of a run: metrics beside the baseline's, time and memory, notes, the run's folder with its `files`,
    and the next commands. Default stream: stdout.
    """
    stream, expectation = stream or sys.stdout, record.expectation
    base = record.baseline.metrics if record.baseline else {}
    cells: Rows = [
        (name, f"{value:.4f}", f"{base[name]:.4f}" if name in base else "") for name, value in record.metrics.items()
    ]
    cost = f"{duration(record.train_seconds)}, {record.samples_per_second:.1f} samples/s"
    cost += f", {memory(record.peak_memory)} at peak" if record.peak_memory is not None else ""
    below: Rows = [("baseline", record.baseline.what)] if record.baseline and base else []
    below += [("verdict", verdict)] if (verdict := closing_line(record)) else []
    below += [("expected", str(expectation))] if expectation else []
    below += [("training", cost), *notes]
    below += [("model", f"{files[0]}, with {', '.join(file.name for file in files[1:])}")] if files else []
    below += [("" if index else "next", command) for index, command in enumerate(commands)]
    heads = ("metric", "this run", "baseline")[: 3 if base else 2]
    if console := terminal(stream):
        shown = [row[: len(heads)] for row in cells]
        console.print(_table("", heads, shown, right=(1, 2)))
        console.print(_notes(below, failed=expectation is not None and not expectation.met))
        return
    for line in [*aligned([heads, *cells], right=(1, 2)), *aligned(below)]:
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
        best = [number for number, row in enumerate(cells) if row[-1] == "best"]
        console.print(_table(title, heads, cells, bold=best))
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
    grid.add_column(overflow="fold")
    for name, value, reason in rows:
        told = Text(value, style="cyan")  # Text, not str: a path may hold [brackets], rich's markup
        grid.add_row(Text(name), told.append(f"{GAP}{reason}" if reason else "", style="dim default"))
    console.print(Panel(grid, title=Text(title, style="bold"), title_align="left", border_style="dim", expand=False))


def _table(title: str, heads: Sequence[str], rows: Rows, *, right: Sequence[int] = (), bold: Sequence[int] = ()) -> Any:
    """Return a table for a terminal: the columns numbered in `right` aligned to the right, the rows in `bold` bold."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.ROUNDED, border_style="dim", header_style="dim")
    for number, head in enumerate(heads):
        table.add_column(Text(head), justify="right" if number in right else "left")
    for number, row in enumerate(rows):
        table.add_row(*(Text(cell) for cell in row), style="bold" if number in bold else "")
    return table


def _notes(rows: Rows, *, failed: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(name, Text(value, style="bold red" if failed and name == "expected" else ""))
    return grid


def takes(stream: TextIO, letters: str = DRAWN) -> bool:
    """Return whether the stream's encoding can write these letters; one without an encoding (StringIO) can."""
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
    """Keep a run going after its reader went away (`| head`) or its terminal was closed."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno != errno.EIO:
            raise


def terminal(stream: TextIO) -> Console | None:
    """Return a rich console where the stream is a terminal that can draw, else None; rich itself honours NO_COLOR.

    FORCE_COLOR is not read: a bar would fill a log file.
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


WIDEST = 160
"""Columns of a line in a log file; the closing table has the metrics that are cut off, of a tagger's every class."""


@dataclass(frozen=True)
class Field:
    """A piece of a line: its text, how early a narrow terminal drops it (0: never), and its colour."""

    text: str
    leave: int = 0
    colour: str = ""


def arrow(now: float, last: float | None, *, drawn: bool = True) -> str:
    """Return ▲ or ▼ (^ or v where the stream cannot write those), `=` for no change, a space for a first value."""
    if last is None or not math.isfinite(now) or not math.isfinite(last):
        return " "
    up, down = "▲▼" if drawn else "^v"
    return up if now > last else down if now < last else "="


def step_fields(
    logs: Mapping[str, Any],
    last_loss: float | None = None,
    *,
    step: int,
    total: int,
    rate: float | None = None,
    used: tuple[int, int | None] | None = None,
    eta: float | None = None,
    drawn: bool = True,
) -> list[Field]:
    """Return the fields of a training line from Trainer's log of it, left to right, without what is None or missing.

    `rate` in samples per second, `used` memory and its peak in bytes, `eta` in seconds.
    """
    loss, norm = float(logs["loss"]), logs.get("grad_norm")
    colour = _judge(loss, last_loss, greater_is_better=False)
    fields = [Field(_progress("step", step, total))]
    if logs.get("epoch") is not None:
        fields.append(Field(f"epoch {logs['epoch']:5.2f}", leave=2))
    fields.append(Field(f"loss {loss:7.4f} {arrow(loss, last_loss, drawn=drawn)}", colour=colour))
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
        size, unit, digits = (MIB, "MiB", 0) if max(used[0], used[1] or 0) < GIB / 10 else (GIB, "GiB", 2)
        peak = f"/{used[1] / size:.{digits}f}" if used[1] is not None else ""
        fields.append(Field(f"{used[0] / size:.{digits}f}{peak} {unit}", leave=4))
    if eta is not None:
        fields.append(Field(f"eta {clock(eta)}", leave=6))
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
        # The last of equals goes first: a class's metrics follow the overall ones.
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
