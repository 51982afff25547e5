"""One line that says what a command is doing before it has something to print; importing torch alone takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.status import Status

SPINNER = "dots"
_shown: Status | None = None


@contextmanager
def shown(words: str, *, log: str = "") -> Iterator[None]:
    """Show `words` with a spinner while the context lasts, until `over`, where stderr is a terminal.

    What others print meanwhile appears above it, and nothing of it stays. A log file gets the line `log` on stdout, if
    there is one. An outer status stays as it is.
    """
    global _shown
    if _shown is not None:
        yield
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        if log:
            print(log, flush=True)
        yield
        return
    from rich.console import Console

    # Four frames a second: an import needs the interpreter for itself.
    _shown = Console(stderr=True, highlight=False).status(words, spinner=SPINNER, refresh_per_second=4)
    try:
        with _shown:
            now(words)  # draws at once, before an import leaves the drawing thread no time
            yield
    finally:
        _shown = None


def now(words: str) -> None:
    """Say that the command has come to `words`; without a status nothing is shown."""
    if _shown is not None:
        _shown.update(words, spinner=SPINNER)


def over() -> None:
    """Take the line away, because the command's own output follows."""
    if _shown is not None:
        _shown.stop()
