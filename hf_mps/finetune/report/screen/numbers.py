"""Numbers as people read them, and lines that any output can take."""

from __future__ import annotations

import contextlib
import math
import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

GIB = 2**30
DRAWN = "▲▼╭━"


def memory(size: float) -> str:
    """Bytes in words: `512 MiB` below one GiB, `1.94 GiB` above."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"


def clock(seconds: float) -> str:
    """Seconds as `3:12` or `1:02:45`; `--:--` for what is not finite."""
    if not math.isfinite(seconds):
        return "--:--"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def duration(seconds: float) -> str:
    """Seconds in words: `12.3 s`, `3 min 12 s`, `1 h 02 min`."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def takes(stream: TextIO, letters: str = DRAWN) -> bool:
    """Whether the stream's encoding has a form for these letters; a stream that names none (StringIO) does."""
    try:
        letters.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def say(stream: TextIO, line: str) -> None:
    """Print one line whatever the stream's encoding; a reader that went away (`| head`) does not end a training run."""
    if not takes(stream, line):
        encoding = stream.encoding
        line = line.encode(encoding, errors="replace").decode(encoding)
    with contextlib.suppress(BrokenPipeError):
        print(line, file=stream, flush=True)


def terminal(stream: TextIO) -> Console | None:
    """A rich console where the stream is a terminal that can draw, else None; rich itself honours NO_COLOR.

    FORCE_COLOR is not asked: in a log file a bar that redraws itself is litter.
    """
    if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown") or not takes(stream):
        return None
    from rich.console import Console

    return Console(file=stream, highlight=False)
