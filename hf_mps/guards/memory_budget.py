"""memory-budget: a process may not take more than the machine has, and is told before macOS begins to swap."""

from __future__ import annotations

import os
from time import monotonic
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards import moments
from hf_mps.guards.guard import Guard, around

VARIABLES = ("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "PYTORCH_MPS_LOW_WATERMARK_RATIO")
PYTORCHS = 1.7
"""PyTorch's own limit, as a share of Metal's recommended maximum (MPSAllocator.h, default_high_watermark_ratio)."""
NEAR = 0.95
"""Share of the recommended maximum from which on the user is told."""
FULL = 0.03
"""Share of the machine's memory that is left when everything else has to be swapped out."""
EVERY = 1.0
"""Seconds between two looks; one takes some ten microseconds."""


class MemoryBudget(Guard):
    """Sets the limit once, when the first optimizer is made, and looks at the figures once a second, at a batch."""

    name = "memory-budget"
    what = "PyTorch's limit, 1.7 times Metal's recommended maximum, lies above the memory of the Mac: it swaps instead"
    issue = "https://github.com/pytorch/pytorch/issues/105839"
    until = "the limit that PyTorch sets itself lies within the machine's memory"

    def __init__(self) -> None:
        super().__init__()
        self._set = False
        self._told = False
        self._looked = 0.0

    def forget(self) -> None:
        """Also look, and set the limit, anew."""
        super().forget()
        self._set, self._told, self._looked = False, False, 0.0

    def applies(self) -> Choice[bool]:
        """Whether PyTorch's limit is above the machine's memory, and nobody gave another."""
        given = _given()
        if given:
            return Choice(False, f"{given} is the user's word")
        physical, recommended = _sizes()
        if not physical or not recommended:
            return Choice(False, "the machine's memory is not known")
        return Choice(
            physical < PYTORCHS * recommended,
            f"PyTorch would take up to {_gib(PYTORCHS * recommended)}; "
            f"the machine has {_gib(physical)}{_label()}, of which {_gib(recommended)} are recommended",
        )

    def install(self, module: ModuleType) -> None:
        """See the first optimizer, batches before they are moved, and a limit that a script sets itself."""
        if module.__name__ == "torch":
            moments.parameters(self, module, self._limit)
            around(self, module.mps, "set_per_process_memory_fraction", self._set_by_script)
        else:
            moments.batches(self, module, self._look)

    def _set_by_script(self, stock: Any, *args: Any, **kwargs: Any) -> None:
        self._set = True
        stock(*args, **kwargs)

    def _limit(self, parameters: list[Any]) -> None:
        if self._set:
            return
        self._set = True
        if self.needed:
            import torch

            physical, recommended = _sizes()
            # For the whole process, and to stay: the allocator has one limit. A script's own comes before and after.
            torch.mps.set_per_process_memory_fraction(max(1.0, physical / recommended))
            self.acted(f"the limit of GPU memory is the machine's: {self.verdict().reason}", aloud=False)

    def _look(self, batch: Any) -> Any:
        now = monotonic()
        if not self._told and now - self._looked >= EVERY:
            self._looked = now
            line = _warning()
            if line:
                self._told = True
                self.acted(line)
        return batch


def _warning() -> str:
    """What is to be said of the memory now, or an empty string."""
    import psutil

    from hf_mps.device import memory

    physical, recommended = _sizes()
    held = memory.driver("mps")
    if recommended and held > NEAR * recommended:
        most = f"{_gib(recommended)}{_label()}"
        what = f"this process holds {_gib(held)} of GPU memory, and macOS recommends at most {most}"
    elif held > physical / 4 and psutil.virtual_memory().available < FULL * physical:
        left = _gib(psutil.virtual_memory().available)
        what = f"{left} of {_gib(physical)}{_label()} are left, with {_gib(held)} held here"
    else:
        return ""
    return (
        f"{what}: soon macOS swaps, and each step takes several times as long; next: a smaller batch with gradient "
        f"accumulation for the same one, gradient checkpointing, shorter sequences, or other programs closed"
    )


def _given() -> str:
    return next((f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ), "")


def _sizes() -> tuple[int, int]:
    """Bytes of the machine, and those that Metal recommends as a maximum."""
    from hf_mps.device import memory

    return memory.total("mps"), memory.recommended("mps") or 0


def _label() -> str:
    from hf_mps.device import machine

    return machine.present().label


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


GUARD = MemoryBudget()
