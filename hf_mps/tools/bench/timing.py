"""The time of a step: the device's work is done before the clock is read, the first steps do not count, medians do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hf_mps.metal.device import memory
from hf_mps.tools.bench.cases import Phase

FEWEST = 3
"""Repetitions that are made however long they take; a median of fewer is none."""


@dataclass(frozen=True)
class Settings:
    """Steps that do not count, steps that do at most, and seconds after which no further one begins."""

    warm_up: int
    repetitions: int
    seconds: float


class _Enough(Exception):
    """Ends the steps early."""


def timed(
    phase: Phase, device: str, settings: Settings, batch: int, told: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Return the figures of a phase's steps of `batch` rows on `device`, as they are stored.

    `told` is called with the counted steps so far. A device whose memory is too small is a finding (`failure`), no
    error. Imports torch.
    """
    import torch

    peak, steps, mark = memory.Peak(device), list[float](), 0.0

    def tick(number: int) -> None:
        nonlocal mark
        # What was given to the device is done before the clock is read.
        if device != "cpu":
            getattr(torch, device).synchronize()
        now = time.perf_counter()
        if number > settings.warm_up:
            steps.append(now - mark)
        if len(steps) >= FEWEST and sum(steps) >= settings.seconds:
            raise _Enough
        told(len(steps))
        peak.sample()
        # Last, so that what is done between two steps is part of neither.
        mark = time.perf_counter()

    try:
        with peak, suppress(_Enough):
            phase(settings.warm_up + settings.repetitions, tick, ())
    except RuntimeError as error:
        if not (memory.refused(error) or type(error).__name__ == "OutOfMemoryError"):
            raise
        return {"failure": "its memory is too small for this batch"}
    median = statistics.median(steps)
    return {
        "seconds": round(median, 6),
        "fastest": round(min(steps), 6),
        "slowest": round(max(steps), 6),
        "repetitions": len(steps),
        "rows_per_second": round(batch / median, 3),
        "memory_bytes": peak.result.value,
        "memory_is": peak.result.reason,
    }
