"""The memory that a training may take, of a named or the present machine, and the largest batch that fits into it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hf_mps.core.errors import UserError, nearest
from hf_mps.core.text import GIB
from hf_mps.metal.device import profiles

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
        profile = profiles.Profile(f"{given[1]} GB", "Apple silicon", 0, int(given[1]) * GIB, (0, 0))
        return Machine(f"a Mac with {given[1]} GB", profile.memory, profile.recommended_max)
    word = text.strip().lower()
    if word not in profiles.PROFILES:
        allowed = f"a size as 16gb, or {', '.join(profiles.PROFILES)}"
        raise UserError(f"--memory {text} is not a machine; allowed: {allowed}{nearest(word, profiles.PROFILES)}")
    profile = profiles.PROFILES[word]
    return Machine(profile.name, profile.memory, profile.recommended_max)


def present() -> Machine:
    """This Mac, or the simulated one. Imports torch."""
    from hf_mps.metal.device import machine, memory

    total = memory.total("mps")
    return Machine(machine.present().chip, total, memory.recommended("mps") or total)


def of_ranks(ranks: int) -> Machine:
    """Return what one of `ranks` may take: a GPU's memory where CUDA is there, else its share of the machine's."""
    import torch

    from hf_mps.metal.device import machine, memory

    if torch.cuda.is_available():
        total = memory.total("cuda")
        return Machine(torch.cuda.get_device_name(), total, total, "fragments and NCCL have little left")
    total = memory.total("cpu") // ranks
    return Machine(f"one of {ranks} parts of {machine.present().chip}", total, total, "it begins to swap")


LARGEST_BATCH, TRACES = 4096, 8
"""Rows of the largest batch that is looked for, and traces that the search may take beside the first two."""


def largest(peak_of: Callable[[int], int], limit: int, first: int, most: int = LARGEST_BATCH) -> int:
    """Return the most rows of a batch whose peak is within `limit` bytes, 0 where not even one is; at most `most`.

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
            if size + slope > limit:  # the highest of several lines: it rises no slower further on
                break
            if high <= most:
                slope = max(slope, (peak_of(high) - size) / (high - low))
        if high - low <= max(1, low // 50):
            break
        # Level where another moment than the batch's is the highest: then in large strides.
        reach = low + (limit - peak_of(low)) / slope if slope > 0 else 8 * low
        guess = min(max(int(reach), low + 1), high - 1)
    return low
