"""What a run prints to: a file or a pipe of some encoding, and a terminal."""

from __future__ import annotations

import io
import re


class Piped(io.StringIO):
    """A log file, or whatever else is no terminal, of a given encoding."""

    def __init__(self, encoding: str | None = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str | None:  # type: ignore[override]
        return self._encoding

    def lines(self) -> list[str]:
        return self.getvalue().splitlines()


class Terminal(Piped):
    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What was printed, without colours and cursor movements."""
        return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", self.getvalue()).split("\n")]
