"""Sizes, durations, errors and plain tables as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

MIB, GIB = 2**20, 2**30


def memory(size: float) -> str:
    """Bytes in words: `512 MiB` below one GiB, `1.94 GiB` above."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"


def gib(size: float) -> str:
    """Bytes in GiB alone, as a machine's sizes are told: `10.7 GiB`."""
    return f"{size / GIB:.1f} GiB"


def clock(seconds: float) -> str:
    """Seconds as `3:12` or `1:02:45`; `--:--` for what is not finite."""
    if not math.isfinite(seconds):
        return "--:--"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """Seconds in words: `12.3 s`, `3 min 12 s`, `1 h 02 min`."""
    # From there on one digit would make it 60.0 s.
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 row`, `2 rows`, `0 rows`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def first_line(error: BaseException | str) -> str:
    """What an error says, in one line: its first, with the next one where that only leads to it; or its kind's name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__


def summary(error: BaseException) -> str:
    """Return an error's kind and first line, `ValueError: …`; its kind alone where it says nothing."""
    kind, words = type(error).__name__, first_line(error)
    return kind if words == kind else f"{kind}: {words}"


def aligned(rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), widest: int = 40) -> Iterator[str]:
    """Yield the rows as lines, two spaces between columns, the columns numbered in `right` aligned to the right.

    A cell of more than `widest` letters shifts its own line only.
    """
    rows = list(rows)
    columns = range(max(map(len, rows), default=0))
    cells = [[row[at] for row in rows if at < len(row)] for at in columns]
    widths = [max((len(cell) for cell in some if len(cell) <= widest), default=0) for some in cells]
    for row in rows:
        padded = [cell.rjust(widths[at]) if at in right else cell.ljust(widths[at]) for at, cell in enumerate(row)]
        yield "  ".join(padded).rstrip()
