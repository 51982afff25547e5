"""What ran: which operators launched a release's kernels, which ran as before, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """Counts since it was made, of all threads."""

    operators: Counter[str] = field(default_factory=Counter)
    """Calls of an operator ("add.Tensor") that a rule ran whole."""
    kernels: Counter[str] = field(default_factory=Counter)
    """Launches of a kernel by its name."""
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls of an operator that has a rule, and that the rule did not cover: the operator and the reason."""

    def ran(self, operator: str, kernels: list[str]) -> None:
        """An operator's rule ran, and launched these kernels."""
        self.operators[operator] += 1
        self.kernels.update(kernels)

    def without(self, operator: str, reason: str) -> None:
        """An operator's rule did not cover a call, and the simulated device ran it."""
        self.reasons[operator, reason] += 1

    def clear(self) -> None:
        """Forget all counts."""
        for counts in (self.operators, self.kernels, self.reasons):
            counts.clear()
