"""The time of a step: the device's work is done before the clock is read, the first steps do not count, medians do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.metal.device import memory
from hf_mps.tools.bench.cases import Tick

FEWEST = 3
"""Repetitions that are made however long they take; a median of fewer is none."""


@dataclass(frozen=True)
class Settings:
    """Steps that do not count, steps that do at most, and seconds after which no further one begins."""

    warm_up: int
    repetitions: int
    seconds: float


@dataclass(frozen=True)
class Timed:
    """Seconds of each counted step in order, and the largest memory in bytes with how it was found.

    `failure` says in a line why there are none: the device's memory was too small.
    """

    steps: tuple[float, ...]
    memory: Choice[int] | None = None
    failure: str = ""

    @property
    def seconds(self) -> float:
        """Return the median step."""
        return statistics.median(self.steps)

    def values(self, batch: int) -> dict[str, Any]:
        """The figures as they are stored."""
        if self.failure:
            return {"failure": self.failure}
        return {
            "seconds": round(self.seconds, 6),
            "fastest": round(min(self.steps), 6),
            "slowest": round(max(self.steps), 6),
            "repetitions": len(self.steps),
            "rows_per_second": round(batch / self.seconds, 3),
            "memory_bytes": self.memory.value if self.memory else None,
            "memory_is": self.memory.reason if self.memory else None,
        }


class _Enough(Exception):
    """Ends the steps early."""


@dataclass
class _Clock:
    """Reads the time after each step, when the device has done it."""

    device: str
    settings: Settings
    peak: memory.Peak
    told: Callable[[int], None]
    steps: list[float] = field(default_factory=list)
    _mark: float = 0.0

    def tick(self, number: int) -> None:
        synchronize(self.device)
        now = time.perf_counter()
        if number > self.settings.warm_up:
            self.steps.append(now - self._mark)
        if len(self.steps) >= FEWEST and sum(self.steps) >= self.settings.seconds:
            raise _Enough
        self.told(len(self.steps))
        self.peak.sample()
        self._mark = time.perf_counter()


def timed(
    phase: Callable[[int, Tick, Sequence[Any]], None],
    device: str,
    settings: Settings,
    told: Callable[[int], None] = lambda done: None,
) -> Timed:
    """Return the steps of a phase on `device`, timed; `told` is called with the counted steps so far.

    A device whose memory is too small is a finding, no error.
    """
    peak = memory.Peak(device)
    clock = _Clock(device, settings, peak, told)
    try:
        with peak:
            phase(settings.warm_up + settings.repetitions, clock.tick, ())
    except _Enough:
        pass
    except RuntimeError as error:
        if not (memory.refused(error) or type(error).__name__ == "OutOfMemoryError"):
            raise
        return Timed((), failure="its memory is too small for this batch")
    return Timed(tuple(clock.steps), peak.result)


def synchronize(device: str) -> None:
    """Wait until `device` has done what it was given. Imports torch."""
    import torch

    if device != "cpu":
        getattr(torch, device).synchronize()
