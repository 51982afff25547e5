"""loss-frozen: a loss that agrees to the last bit for many steps, of a training that has not come to rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from hf_mps.layer.guards.sentinels.base import Sentinel

TIMES = 30
FIRST = 8
"""Losses of a training that say where it began."""
LEARNED = 1e-3
"""Share of the first losses, and of the largest gradient norm, from which on a training has come to rest.

What learns nothing keeps both: its loss stays where it was, and its gradients are as large as before or were never
there. A batch learned by heart brings the loss to what its dtype can tell from zero, 1e-7 for a cross-entropy in
float32 and 1e-14 for a squared error; a minimum above zero brings the gradient there.
"""
STEPS_OF_DTYPE = 8
"""Losses of that many times the dtype's own resolution are learned too: bfloat16 tells 0.06 from no less."""


@dataclass
class _Run:
    value: float = math.nan
    length: int = 0
    told: bool = False
    seen: int = 0
    first: float = 0.0
    largest_norm: float = 0.0
    last_norm: float = math.nan

    def at_rest(self, resolution: float) -> bool:
        """Whether the training has arrived: at a small share of its first losses, or at one of its gradients."""
        learned = abs(self.value) <= max(LEARNED, STEPS_OF_DTYPE * resolution) * self.first
        # A gradient of exactly zero is no minimum that rounding reaches: nothing comes through any more.
        flat = 0 < self.last_norm <= LEARNED * self.largest_norm
        return learned or (flat and abs(self.value) < self.first)


class LossFrozen(Sentinel):
    """Counts backward passes in a row whose losses are one number; a loss of exactly zero is learned, not frozen."""

    name = "loss-frozen"
    what = f"a loss that agrees to the last bit in {TIMES} backward passes in a row, of a training not at rest"
    why = (
        f"warns, because some losses are made so; at rest is a training at {LEARNED:g} of its first losses or of its"
        " largest gradient norm"
    )

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
        for _, norm in norms:
            run.largest_norm, run.last_norm = max(run.largest_norm, norm), norm
        for step, loss in losses:
            if run.seen < FIRST and math.isfinite(loss):
                run.first = max(run.first, abs(loss))
            run.seen += 1
            run.length = run.length + 1 if loss == run.value else 1
            run.value = loss
            if run.length == TIMES and loss != 0 and not run.told and not run.at_rest(series.resolution):
                run.told = True
                self.acted(
                    f"the loss was {loss:.9g} in {TIMES} backward passes in a row, up to optimizer step {step}: it"
                    " agrees to the last bit, so nothing is learned; next: see that weights require gradients, the"
                    " learning rate is above 0 and batches reach the device whole"
                )


SENTINEL = LossFrozen()
