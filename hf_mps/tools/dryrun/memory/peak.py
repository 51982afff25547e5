"""A moment of a traced step: what it holds, of what it is made, and where it is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Peak:
    """The highest moment: bytes in all and by part, and where it was: phase and module."""

    bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    where: tuple[str, str] = ("", "")
