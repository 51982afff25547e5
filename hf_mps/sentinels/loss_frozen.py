"""loss-frozen: a loss that agrees to the last bit for many steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hf_mps.sentinels.sentinel import Sentinel

TIMES = 30


@dataclass
class _Run:
    value: float = math.nan
    length: int = 0
    told: bool = False


class LossFrozen(Sentinel):
    """Counts backward passes in a row whose losses are one number; a loss of exactly zero is learned, not frozen."""

    name = "loss-frozen"
    what = f"a loss other than zero that agrees to the last bit in {TIMES} backward passes in a row"
    why = "warns, because a model that has come to rest on one repeated batch shows the same"

    def __init__(self) -> None:
        super().__init__()
        self._runs: WeakKeyDictionary[Any, _Run] = WeakKeyDictionary()

    def forget(self) -> None:
        """Also forget every training."""
        super().forget()
        self._runs.clear()

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """Count on."""
        run = self._runs.setdefault(series, _Run())
        for step, loss in losses:
            run.length = run.length + 1 if loss == run.value else 1
            run.value = loss
            if run.length == TIMES and loss != 0 and not run.told:
                run.told = True
                self.acted(
                    f"the loss was {loss:.9g} in {TIMES} backward passes in a row, up to optimizer step {step}: it"
                    " agrees to the last bit, so nothing is learned; next: see that weights require gradients, the"
                    " learning rate is above 0 and batches reach the device whole"
                )


SENTINEL = LossFrozen()
