"""The memory that a training may take, of a named or the present machine, and the largest batch that fits into it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_mps.core.errors import UserError, nearest
from hf_mps.core.text import GIB
from hf_mps.metal.device import machine, memory, profiles

_SIZE = re.compile(r"(\d+)\s*(gb|gib|g)?", re.I)


@dataclass(frozen=True)
class Machine:
    """In bytes: `memory` in all, `recommended` is Metal's recommended maximum for one process.

    `beyond` says what happens above `comfortable`.
    """

    name: str
    memory: int
    recommended: int
    beyond: str = "macOS begins to swap"

    @property
    def comfortable(self) -> int:
        """Up to here nothing swaps; the guard memory-budget warns from here on."""
        from hf_mps.layer.guards.platform.memory import NEAR

        return int(self.recommended * NEAR)

    def verdict(self, size: int) -> str:
        """fits, swaps or "does not fit" for a peak of `size` bytes."""
        if size <= self.comfortable:
            return "fits"
        return "swaps" if size <= self.memory else "does not fit"


def named(text: str) -> Machine:
    """The machine that `text` names: 16gb, or a profile's name (m2-pro-16gb). Raises UserError for anything else."""
    given = _SIZE.fullmatch(text.strip())
    if given and int(given[1]) > 0:
        profile = profiles.Profile(f"a Mac with {given[1]} GB", "Apple silicon", 0, int(given[1]) * GIB, (0, 0))
    elif (word := text.strip().lower()) in profiles.PROFILES:
        profile = profiles.PROFILES[word]
    else:
        allowed = f"a size as 16gb, or {', '.join(profiles.PROFILES)}"
        raise UserError(f"--memory {text} is not a machine; allowed: {allowed}{nearest(word, profiles.PROFILES)}")
    return Machine(profile.name, profile.memory, profile.recommended_max)


def present() -> Machine:
    """This Mac, or the simulated one. Imports torch."""
    total = memory.total("mps")
    return Machine(machine.present().chip, total, memory.recommended("mps") or total)


def of_ranks(ranks: int) -> Machine:
    """Return what one of `ranks` may take: a GPU's memory where CUDA is there, else its share of the machine's."""
    import torch

    if torch.cuda.is_available():
        total = memory.total("cuda")
        return Machine(torch.cuda.get_device_name(), total, total, "fragments and NCCL have little left")
    total = memory.total("cpu") // ranks
    return Machine(f"one of {ranks} parts of {machine.present().chip}", total, total, "it begins to swap")


LARGEST_BATCH, TRACES, FURTHER = 4096, 8, 8
"""Rows of the largest batch that is looked for, and traces that the search may take."""
Moments = Mapping[Any, int]


def largest(
    moments_of: Callable[[int], Moments], limit: int, first: int, kept: int = 0, most: int = LARGEST_BATCH
) -> int:
    """Return the most rows of a batch whose step is within `limit` bytes, 0 where not even one is; at most `most`.

    `moments_of` returns the bytes of a step's moments for so many rows. Each grows by the same bytes for each row, or
    by fewer from some size on, as a loss in chunks does. So a line through two batches is never too low beyond them:
    what it says fits does, and is taken up to FURTHER times the larger one. The search begins with a batch of `first`
    rows, of whose peak `kept` bytes do not depend on the rows.
    """
    low, high = 0, most + 1  # what fits, and what does not
    known: dict[int, Moments] = {}
    guess = min(first, most)
    while kept <= limit and len(known) < TRACES:
        known[guess] = moments_of(guess)
        peak = max(known[guess].values())
        low, high = (low, guess) if peak > limit else (guess, high)
        if len(known) == 1:
            reach = guess * (limit - kept) / max(1, peak - kept)
            if reach < 1:
                return 0
        else:
            reach = _reach(sorted(known, key=lambda rows: abs(rows - (low + high) / 2)), known, limit)
            if low and high > most and reach < FURTHER * low:
                return min(int(reach), most)
        # Two in a hundred rows are near enough: each further look is a whole trace.
        if high - low <= max(1, low // 50) or 0 < int(reach) <= low:
            break
        guess = min(max(int(reach), low + 1), high - 1)
    return low


def _reach(nearest: Sequence[int], known: Mapping[int, Moments], limit: int) -> float:
    """Return the rows at which the first of the lines through the moments of two batches is at `limit` bytes."""
    one, other = nearest[:2]
    first, second = known[one], known[other]
    pairs = [(max(first.values()), max(second.values()))]  # moments of one batch alone are in these
    pairs += [(first[each], second[each]) for each in first.keys() & second.keys()]
    slopes = ((size, (more - size) / (other - one)) for size, more in pairs)
    # Where all are level, in large strides.
    return min((one + (limit - size) / slope for size, slope in slopes if slope > 0), default=8 * max(one, other))
