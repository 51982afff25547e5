"""What the collectives on mps have moved in this process: calls, bytes that Gloo was given, bytes that were copied."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace


@dataclass
class Traffic:
    """Counts since the process began; take two and subtract for a step's."""

    calls: int = 0
    """Collectives, sends and receives."""
    payload: int = 0
    """Bytes of the tensors that Gloo read or wrote, in place ones once."""
    copied: int = 0
    """Bytes that were copied between a tensor and what Gloo worked on: 0 where it works on the tensor's own memory."""
    waits: int = 0
    """How often the program waited for the device on behalf of a collective."""

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(*(now - before for now, before in zip(astuple(self), astuple(earlier), strict=True)))

    def per(self, steps: int) -> Traffic:
        """Return the same of one of `steps` steps, rounded down to whole bytes; itself where there was none."""
        return Traffic(*(count // max(1, steps) for count in astuple(self)))


COUNTER = Traffic()
"""Adds up; written under Python's lock alone, as every call comes through a Python function."""


def traffic() -> Traffic:
    """Return what this process has moved so far; all zero where no collective ran on mps."""
    return replace(COUNTER)
