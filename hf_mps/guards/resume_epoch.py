"""resume-epoch: the rest of a resumed epoch has that epoch's order of rows, not the first one's."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards.code import words
from hf_mps.guards.guard import Guard, around


class ResumeEpoch(Guard):
    """Hands the loader's count of epochs to the one that skip_first_batches makes of it, whatever the device."""

    name = "resume-epoch"
    what = "skip_first_batches counts epochs from 0, so that a seeded sampler repeats the first epoch's order of rows"
    issue = "accelerate/data_loader.py skip_first_batches (1.10), where DataLoaderShard is made without iteration="
    until = "the oldest supported accelerate hands the loader's iteration on, as 1.15 does"

    def __init__(self) -> None:
        super().__init__()
        self._hands_on = False

    def applies(self) -> Choice[bool]:
        """Whether the installed function never names the loader's count."""
        if self._hands_on:
            return Choice(False, "skip_first_batches of this accelerate hands the count of epochs on")
        return Choice(True, "skip_first_batches of this accelerate begins to count epochs anew")

    def install(self, module: ModuleType) -> None:
        """Put it around accelerate.data_loader.skip_first_batches, before others import it by name."""
        self._hands_on = "iteration" in words(module.skip_first_batches)
        if not self._hands_on:
            around(self, module, "skip_first_batches", self._skipped)

    def _skipped(self, stock: Callable[..., Any], dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        rest = stock(dataloader, *args, **kwargs)
        count = getattr(dataloader, "iteration", 0)
        if hasattr(rest, "iteration") and rest.iteration != count:
            rest.iteration = count
            self.acted("the rest of a resumed epoch has the order of rows of that epoch", aloud=False)
        return rest


GUARD = ResumeEpoch()
