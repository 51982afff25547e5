"""gradient-norm: a gradient norm out of all proportion to those before it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hf_mps.layer.guards.sentinels.base import Sentinel

HISTORY = 8
"""Norms before the first that is judged."""
TIMES = 100.0
"""How many times the largest norm before.

MiniLM on MRPC stayed below 2 times in four trainings of 100 to 300 steps, one of them on 96 rows that it learned by
heart, one at a learning rate of 1e-3 (scripts/bench/bench_sentinels.py --norms); pytorch#177116 makes 1e3 to 1e5 times.
"""


@dataclass
class _History:
    count: int = 0
    largest: float = 0.0
    told: bool = False


class GradientNorm(Sentinel):
    """Compares each norm with the largest before it, not with their median.

    A model that has learned its rows has norms near zero and then, at a row it has not, one as in its first steps:
    many times the median, and no fault.
    """

    name = "gradient-norm"
    what = f"a gradient norm more than {TIMES:.0f} times the largest of all before it, after at least {HISTORY}"
    why = (
        "warns, because a row that is far off can do it too; scripts/bench/bench_sentinels.py measures how far real"
        " training stays below"
    )

    def __init__(self) -> None:
        super().__init__()
        self._histories: WeakKeyDictionary[Any, _History] = WeakKeyDictionary()

    def forget(self) -> None:
        """Also forget every training."""
        super().forget()
        self._histories.clear()

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """Judge each new norm, in their order."""
        history = self._histories.setdefault(series, _History())
        for step, norm in norms:
            if not math.isfinite(norm):  # another sentinel's business
                continue
            known = history.count >= HISTORY and history.largest > 0
            if known and norm > TIMES * history.largest and not history.told:
                history.told = True
                self.acted(
                    f"the gradient norm was {norm:.3g} at optimizer step {step}, {norm / history.largest:,.0f} times"
                    f" the largest of the {history.count} before it; next: a look at that batch's rows,"
                    " and hf-mps parity: does the device compute what the CPU does?"
                )
            history.count += 1
            history.largest = max(history.largest, norm)


SENTINEL = GradientNorm()
