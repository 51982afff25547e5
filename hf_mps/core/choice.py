"""A decision and its reason: what every function returns that decides something for the user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A value and one sentence (no final full stop) that says why it was taken."""

    value: T
    reason: str

    def __str__(self) -> str:
        return f"{self.value} ({self.reason})"
