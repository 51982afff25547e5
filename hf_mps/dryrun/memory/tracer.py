"""The peak of a target's training step, from a trace, and the largest batch of it that a machine can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice

if TYPE_CHECKING:
    from hf_mps.dryrun.prepare import Parts
    from hf_mps.dryrun.step import TrainingStep

LARGEST = 4096
TRACES = 8


@dataclass(frozen=True)
class Estimate:
    """Bytes at the highest moment of a step of `rows` by `length`, in all and by part; `where` it is, in words.

    `length` is in tokens, None where rows have none; `width` says in words how wide rows are. `accumulation`
    micro-batches make one optimizer step.
    """

    rows: int
    length: int | None
    accumulation: int
    bytes: int
    parts: dict[str, int]
    where: str
    width: str = ""
    facts: dict[str, Choice[Any]] = field(default_factory=dict)


class Tracer:
    """Traces the steps of one target in batches of any size; what is the same for all of them is made once.

    `also` is asked for a further dispatch mode that looks on at each step.
    """

    def __init__(
        self,
        parts: Parts,
        device: Choice[str],
        length: int | None = None,
        also: Callable[[TrainingStep], Any] | None = None,
    ) -> None:
        from hf_mps.dryrun.batch import width

        self._parts, self._device = parts, device
        self._also = also
        self.wide = width(parts.recipe, parts.prepared, length)
        self._known: dict[int, Estimate] = {}
        self.rows = self._said("per_device_train_batch_size", 32)
        self.accumulation = self._said("gradient_accumulation_steps", 1)

    def __call__(self, rows: int | None = None) -> Estimate:
        """The estimate for a batch of `rows`, by default the recipe's."""
        rows = rows or self.rows
        if rows not in self._known:
            self._known[rows] = self._trace(rows)
        return self._known[rows]

    def _trace(self, rows: int) -> Estimate:
        from hf_mps.core.errors import RunError, first_line
        from hf_mps.dryrun import prepare
        from hf_mps.dryrun.memory import trace
        from hf_mps.finetune.smoke.fake import needs_numbers

        # Of many micro-batches the second is like all that follow: gradients are there, and activations again.
        changes = {"gradient_accumulation_steps": min(self.accumulation, 2)}
        step = prepare.step(self._parts, self._device, fake=True, changes=changes, rows=rows, wide=self.wide)
        try:
            found = trace.peak(step, *([self._also(step)] if self._also is not None else []))
        except Exception as error:
            if not needs_numbers(error):
                raise
            why = f"{type(error).__name__}: {first_line(error)}"
            raise RunError(f"this step reads values on its way, which a trace does not have: {why}") from error
        phase, module = found.where
        where = f"{phase}: {module}" if module else phase
        return Estimate(
            rows, self.wide.tokens, self.accumulation, found.bytes, found.parts, where, str(self.wide), step.facts
        )

    def _said(self, name: str, default: int) -> int:
        said = self._parts.prepared.arguments_defaults | dict(self._parts.recipe.training)
        return int(said.get(name) or default)


def largest(peak_of: Callable[[int], int], limit: int, first: int, most: int = LARGEST) -> int:
    """The most rows of a batch whose peak is within `limit` bytes, 0 where not even one is; at most `most`.

    Peaks grow by the same bytes for each row over long stretches, so a line through two of them leads near the answer;
    at most TRACES more are made. The answer was traced, and is the largest or within a fiftieth of it.
    """
    if peak_of(1) > limit:
        return 0
    low, high = 1, most + 1  # what fits, and what does not
    guess = min(max(first, 2), most)
    for _ in range(TRACES):
        size = peak_of(guess)
        if size > limit:
            high = guess
            slope = (size - peak_of(low)) / (high - low)
        else:
            slope, low = (size - peak_of(low)) / (guess - low), guess
            if high <= most:
                slope = max(slope, (peak_of(high) - size) / (high - low))
        if high - low <= max(1, low // 50):
            break
        # Level where another moment than the batch's is the highest: then in large strides.
        reach = low + (limit - peak_of(low)) / slope if slope > 0 else 8 * low
        guess = min(max(int(reach), low + 1), high - 1)
    return low
