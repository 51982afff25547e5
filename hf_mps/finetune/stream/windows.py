"""The rows of a lane mixed, a window of them at a time: what a shuffle buffer does, and can be made again."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from hf_mps.finetune.stream.endless import Reader
from hf_mps.finetune.stream.readers import Row

BYTES = 64 * 2**20
"""Letters of text after which a window ends, however few rows it has: long documents must not fill the memory."""


class Windows:
    """The rows of `lane` in windows of `size` rows, each in an order drawn from the seed, the lane and its number.

    While a window is given the next one is read, a row for a row, so that no batch waits for a whole window. A state is
    where the window began and how many of its rows were given: the rows themselves are read again.
    """

    def __init__(self, lane: Reader, size: int, seed: int, state: Mapping[str, Any] | None = None) -> None:
        self.lane = lane.load(state["lane"]) if state else lane
        self._size = size
        self._seed = seed
        self._number = state["window"] if state else 0
        self._given = state["row"] if state else 0
        self._begun = self.lane.state()

    def state(self) -> dict[str, Any]:
        """Where the rows are, as JSON has it."""
        return {"window": self._number, "row": self._given, "lane": self._begun}

    def __iter__(self) -> Iterator[Row]:
        rows = iter(self.lane)
        self._begun = self.lane.state()
        window = _Window(self._size)
        while not window.full:
            window.add(next(rows))
        while True:
            following, begun = _Window(self._size), self.lane.state()
            order = list(range(len(window.rows)))
            random.Random(f"{self._seed}/{self.lane.number}/{self._number}").shuffle(order)
            for place in order[self._given :]:
                self._given += 1
                yield window.rows[place]
                if not following.full:
                    following.add(next(rows))
            while not following.full:
                following.add(next(rows))
            window, self._begun = following, begun
            self._number, self._given = self._number + 1, 0


class _Window:
    """Rows until there are `size` of them, or BYTES letters."""

    def __init__(self, size: int) -> None:
        self.rows: list[Row] = []
        self._size = size
        self._letters = 0

    @property
    def full(self) -> bool:
        return len(self.rows) >= self._size or self._letters >= BYTES

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._letters += letters(row)


def letters(value: Any) -> int:
    """Return how many letters of text a row holds, however deep; another value counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(letters, value.values()))
    return sum(map(letters, value)) if isinstance(value, list) else 1
