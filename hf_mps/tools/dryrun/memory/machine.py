"""The memory that a training may take: of a named Mac, of so many gigabytes, or of the present machine."""

from __future__ import annotations

import re
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
    size_given = _SIZE.fullmatch(text.strip())
    if size_given and int(size_given[1]) > 0:
        size = int(size_given[1]) * GIB
        profile = profiles.Profile(f"{size_given[1]} GB", "Apple silicon", 0, size, (0, 0))
        return Machine(f"a Mac with {size_given[1]} GB", size, profile.recommended_max)
    word = text.strip().lower()
    if word not in profiles.PROFILES:
        allowed = f"a size as 16gb, or {', '.join(profiles.PROFILES)}"
        raise UserError(f"--memory {text} is no machine; allowed: {allowed}{nearest(word, profiles.PROFILES)}")
    profile = profiles.PROFILES[word]
    return Machine(profile.name, profile.memory, profile.recommended_max)


def present() -> Machine:
    """This Mac, or the simulated one. Imports torch."""
    from hf_mps.metal.device import machine, memory

    total = memory.total("mps")
    return Machine(machine.present().chip, total, memory.recommended("mps") or total)


def of_ranks(ranks: int) -> Machine:
    """What one of `ranks` may take: a GPU's memory where CUDA is there, else its share of the machine's."""
    import torch

    from hf_mps.metal.device import machine, memory

    if torch.cuda.is_available():
        total = memory.total("cuda")
        return Machine(torch.cuda.get_device_name(), total, total, "fragments and NCCL have little left")
    total = memory.total("cpu") // ranks
    return Machine(f"one of {ranks} parts of {machine.present().chip}", total, total, "it begins to swap")
