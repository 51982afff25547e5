"""One line for each logging step and each evaluation, and a bar below them on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

from transformers import TrainerCallback

Memory = Callable[[], "tuple[int, int | None] | None"]


class StepLines(TrainerCallback):  # type: ignore[misc]
    """Prints training as it goes; use it as a context manager, so that a Ctrl-C leaves the terminal as it was.

    `memory()` returns (bytes now, bytes at peak or None) or None; `stream` defaults to stdout; `clock` is in seconds.
    Each training entry of the Trainer's log_history gains `samples_per_second`, `memory_bytes`, `peak_memory_bytes`.
    """

    def __init__(
        self,
        *,
        memory: Memory | None = None,
        main_metric: str | None = None,
        greater_is_better: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        raise NotImplementedError

    def attach(self, trainer: object) -> StepLines:
        """Take the place of Trainer's own printer or tqdm bar, and return self."""
        raise NotImplementedError

    def __enter__(self) -> StepLines:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the bar off the terminal; safe to call twice."""
        raise NotImplementedError
