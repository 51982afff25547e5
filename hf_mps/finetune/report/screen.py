"""What a person sees of a run: the header of choices before it, its lines, and the closing table.

Boxed and coloured on a terminal, plain aligned lines otherwise. `step_lines` beside it prints training as it goes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, TextIO, cast

from hf_mps.core import status
from hf_mps.core.text import aligned, duration, memory
from hf_mps.finetune.report.results import closing_line

if TYPE_CHECKING:
    from rich.console import Console

    from hf_mps.finetune.report.results import RunRecord


Rows = list[tuple[str, ...]]
DRAWN = "▲▼╭━"
FRAME = 4
"""Columns that the box around a header takes, or in a file the indentation."""
GAP = "  "


def header(rows: Iterable[tuple[str, Any, str]], *, title: str, brief: bool = False) -> None:
    """Print a run's choices: each row is a name, its value and the reason (may be empty).

    A `brief` header has one line a row: as wide as the terminal, 80 columns in a file.
    """
    status.over()
    stream, console = sys.stdout, terminal(sys.stdout)
    cells: Rows = [tuple(" ".join(str(cell).split()) for cell in row) for row in rows]
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
    record: RunRecord, notes: Sequence[tuple[str, str]] = (), files: Sequence[Path] = (), commands: Sequence[str] = ()
) -> None:
    """Print the end of a run: metrics beside the baseline's, time and memory, notes, the run's folder with its `files`,
    and the next commands.
    """
    stream, expectation = sys.stdout, record.expectation
    base = record.baseline.metrics if record.baseline else {}
    cells: Rows = [
        (name, f"{value:.4f}", f"{base[name]:.4f}" if name in base else "") for name, value in record.metrics.items()
    ]
    cost = f"{duration(record.train_seconds)}, {record.samples_per_second:.1f} samples/s"
    cost += f", {memory(record.peak_memory)} at peak"
    below: Rows = [("baseline", record.baseline.what)] if record.baseline and base else []
    below += [("verdict", verdict)] if (verdict := closing_line(record)) else []
    below += [("expected", str(expectation))] if expectation else []
    below += [("training", cost), *notes]
    below += [("model", f"{files[0]}, with {', '.join(file.name for file in files[1:])}")] if files else []
    below += [("" if index else "next", command) for index, command in enumerate(commands)]
    heads = ("metric", "this run", "baseline")[: 3 if base else 2]
    if console := terminal(stream):
        console.print(_table("", heads, [row[: len(heads)] for row in cells], right=(1, 2)))
        console.print(_notes(below, failed=expectation is not None and not expectation.met))
        return
    for line in [*aligned([heads, *cells], right=(1, 2)), *aligned(below)]:
        say(stream, line)


def comparison(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], files: Sequence[str]) -> None:
    """Print a table of runs under its title, and the files that hold it; a row may end in a remark."""
    stream = sys.stdout
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
