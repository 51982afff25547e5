"""The metrics that a task computes itself, over tokens, generated texts or pairs: which of them a recipe asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune.metrics.catalogue import LOWER_IS_BETTER, OWN, REPORTS


@dataclass
class Chosen:
    """Metrics by name; `reported` are the numbers that an evaluation must give, `main`, the first, judges the run."""

    names: tuple[str, ...]
    reported: tuple[str, ...]
    main: str
    greater_is_better: bool

    def of(self, values: Mapping[str, float]) -> dict[str, float]:
        """Only the numbers that were asked for, in their order."""
        return {name: float(values[name]) for name in self.reported}


def choose(asked: Sequence[str] | None, allowed: Sequence[str], task: str) -> Chosen:
    """The metrics `asked` for, or all of `allowed`, those that `task` can compute.

    Raises UserError for a metric that it cannot.
    """
    names = tuple(dict.fromkeys(asked or allowed))
    for name in names:
        if name not in allowed:
            raise UserError(
                f"metrics has '{name}', which {task} does not compute; allowed: {', '.join(allowed)}"
                f"{nearest(name, allowed)}"
            )
    numbers = REPORTS | OWN
    reported = tuple(number for name in names for number in numbers[name])
    return Chosen(names, reported, reported[0], reported[0] not in LOWER_IS_BETTER)
