"""The one line in which a guard says what it did."""

from __future__ import annotations

import warnings

_said: set[str] = set()


class GuardNotice(UserWarning):
    """A guard of hf_mps did something about a known hazard of Metal."""


def say(line: str) -> None:
    """Warn with `line` at the first line of the user's own code, each distinct line once in a process."""
    if line in _said:
        return
    _said.add(line)
    from hf_mps.fallback.notice import user_line

    warnings.warn_explicit(f"hf_mps: {line}", GuardNotice, *(user_line() or ("<unknown>", 1)))


def forget() -> None:
    """Let everything be said once more."""
    _said.clear()
