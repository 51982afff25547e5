"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """What was looked at, how it is, and what to type or to read next; `next` is empty only where all is well.

    A `note` is worth knowing and needs nothing; a `problem` keeps training off Metal or makes it wrong.
    """

    name: str
    state: State
    says: str
    next: str = ""


def ok(name: str, says: str) -> Finding:
    """A finding that is as it should be."""
    return Finding(name, "ok", says)


def note(name: str, says: str, next: str) -> Finding:
    """A finding that needs nothing now."""
    return Finding(name, "note", says, next)


def problem(name: str, says: str, next: str) -> Finding:
    """A finding that is to be mended."""
    return Finding(name, "problem", says, next)
