"""The one line in which a guard says what it did, or a sentinel what it found."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hf_mps.errors import Notice

_said: set[str] = set()
_listeners: list[Callable[[str], None]] = []


class GuardNotice(Notice):
    """A guard of hf_mps did something about a known hazard of Metal."""


def say(line: str, category: type[Warning] = GuardNotice, *, again: bool = False) -> None:
    """Warn with `line` at the first line of the user's own code, each distinct line once in a process or `again`.

    A program that prints lines of its own takes it instead (`told`).
    """
    if line in _said and not again:
        return
    _said.add(line)
    if _listeners:
        _listeners[-1](line)
        return
    from hf_mps.fallback.notice import user_line

    warnings.warn_explicit(f"hf_mps: {line}", category, *(user_line() or ("<unknown>", 1)))


@contextmanager
def told(listener: Callable[[str], None]) -> Iterator[None]:
    """Give every line to `listener` for a while, in place of a warning."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def forget() -> None:
    """Let everything be said once more."""
    _said.clear()
