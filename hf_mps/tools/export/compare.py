"""An export's logits against the model's: how far apart they are, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_mps.core.errors import RunError
from hf_mps.tools.export.formats import TOLERANCE

if TYPE_CHECKING:
    import numpy

    Logits = Sequence[numpy.ndarray]


@dataclass(frozen=True)
class Difference:
    """Two lists of logits apart. `relative` is the norm of their difference over the norm of the model's own."""

    largest: float
    relative: float
    tolerance: float
    same: int
    """Positions where both give the largest logit to the same class or token."""
    positions: int

    @property
    def within(self) -> bool:
        """Whether the export is as near as its weights promise; not so where a number is not finite."""
        return self.relative <= self.tolerance

    def __str__(self) -> str:
        return (
            f"relative difference {self.relative:.2g} (allowed {self.tolerance:g}), largest {self.largest:.2g},"
            f" the same answer at {self.same} of {self.positions} positions"
        )


@dataclass(frozen=True)
class Comparison:
    """What of an export was compared with the model: who opened it, and the difference, or why there is none."""

    opened_by: str
    difference: Difference | None = None
    not_compared: str = ""

    def lines(self) -> list[str]:
        """Return it as lines for the screen."""
        found = [f"logits   {self.difference}"] if self.difference is not None else []
        return found + ([f"not compared: {self.not_compared}"] if self.not_compared else [])

    def refuse(self, what: str) -> None:
        """Raise RunError where the difference is over the tolerance."""
        if self.difference is not None and not self.difference.within:
            raise RunError(
                f"{what}: its logits, opened by {self.opened_by}, are not the model's: {self.difference}; nothing was"
                " written"
            )


def difference(model: Logits, export: Logits, weights: str) -> Difference:
    """Return how far two lists of logits are apart, each of shape (…, classes), for an export of these `weights`.

    Raises RunError where they are of different shapes.
    """
    import numpy

    for ours, theirs in zip(model, export, strict=True):
        if ours.shape != theirs.shape:
            raise RunError(f"the export gives logits of shape {theirs.shape}, the model {ours.shape}")
    pairs = [
        (ours.astype(numpy.float64), theirs.astype(numpy.float64)) for ours, theirs in zip(model, export, strict=True)
    ]
    apart = numpy.concatenate([(ours - theirs).ravel() for ours, theirs in pairs])
    whole = numpy.concatenate([ours.ravel() for ours, _ in pairs])
    return Difference(
        largest=float(numpy.abs(apart).max()),
        relative=float(numpy.linalg.norm(apart) / (numpy.linalg.norm(whole) or 1.0)),
        tolerance=TOLERANCE[weights],
        same=sum(int((ours.argmax(-1) == theirs.argmax(-1)).sum()) for ours, theirs in pairs),
        positions=sum(ours[..., 0].size for ours, _ in pairs),
    )
