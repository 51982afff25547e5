"""Random choices that are the same in every process and Python version."""

from __future__ import annotations

import random
from collections.abc import MutableSequence, Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Choices that use `random.Random(seed).random()` only: the one method whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def chance(self, probability: float) -> bool:
        """Return True with the given probability."""
        return self._random.random() < probability

    def below(self, count: int) -> int:
        """Return a whole number from 0 to `count` - 1."""
        return int(self._random.random() * count)

    def between(self, low: float, high: float) -> float:
        """Return a number from `low` up to `high`."""
        return low + (high - low) * self._random.random()

    def pick(self, options: Sequence[T]) -> T:
        """Return one of the options."""
        return options[self.below(len(options))]

    def weighted(self, options: Sequence[tuple[T, float]]) -> T:
        """Return one of the options, each as often as its weight says."""
        left = self._random.random() * sum(weight for _, weight in options)
        for option, weight in options:
            left -= weight
            if left < 0:
                return option
        return options[-1][0]

    def shuffle(self, items: MutableSequence[T]) -> None:
        """Put the items into random order, in place."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
