"""memory-budget: a person is told before macOS begins to swap; no limit changes."""

from __future__ import annotations

import os
from time import monotonic
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Register
from hf_mps.core.text import gib
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard

VARIABLE = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
PYTORCHS = 1.7
"""PyTorch's own limit, as a share of Metal's recommended maximum (MPSAllocator.h, default_high_watermark_ratio)."""
NEAR = 0.95
"""Share of the recommended maximum from which on the user is told."""
FULL = 0.03
"""Share of the machine's memory that is left when everything else has to be swapped out."""
EVERY = 1.0
"""Seconds between two looks; one takes some ten microseconds."""


class MemoryBudget(Guard):
    """Looks at the figures once a second, at a batch or an optimizer's step, and speaks once.

    It sets no limit. A lower one would end runs that stock PyTorch finishes by swapping a little, and
    set_per_process_memory_fraction moves the high watermark alone: on a Mac of 36 GB and more the machine's memory lies
    below the low one (1.4 times the recommended maximum), above which PyTorch first collects what it keeps. Both could
    be set by environment variables before the allocator is made, but a process would hand them to its children, where
    they look like the user's word, and each step above a lower low watermark commits more often and takes longer.
    """

    name = "memory-budget"
    what = "PyTorch's limit, 1.7 times Metal's recommended maximum, lies above the memory of the Mac: it swaps instead"
    issue = "https://github.com/pytorch/pytorch/issues/105839"
    until = "PyTorch itself warns before a process takes more than Metal recommends"
    patches = {training_hooks.STEPPED: Register("_stepped"), **training_hooks.batches("_at_batch")}

    def __init__(self) -> None:
        super().__init__()
        self._told = False
        self._looked = 0.0

    def forget(self) -> None:
        """Also look anew."""
        super().forget()
        self._told, self._looked = False, 0.0

    def applies(self) -> Choice[bool]:
        """Whether the machine's memory is known; the reason has PyTorch's limit beside it, whoever set that."""
        physical, recommended = _sizes()
        if not physical or not recommended:
            return Choice(False, "the machine's memory is not known")
        given = os.environ.get(VARIABLE)
        limit = f"takes up to {gib(PYTORCHS * recommended)}" if given is None else f"has the user's {VARIABLE}={given}"
        return Choice(
            True,
            f"tells before macOS swaps: PyTorch {limit}, the machine has {gib(physical)}{_label()}, of which "
            f"{gib(recommended)} are recommended",
        )

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if training_hooks.steps_on_metal(optimizer):
            self.safely(self._look)

    def _at_batch(self, batch: Any) -> Any:
        self._look()
        return batch

    def _look(self) -> None:
        now = monotonic()
        if not self._told and now - self._looked >= EVERY:
            self._looked = now
            line = _warning()
            if line:
                self._told = True
                self.acted(line)


def _warning() -> str:
    """What is to be said of the memory now, or an empty string."""
    import psutil

    from hf_mps.metal.device import memory

    physical, recommended = _sizes()
    held = memory.driver("mps")
    if recommended and held > NEAR * recommended:
        most = f"{gib(recommended)}{_label()}"
        what = f"this process holds {gib(held)} of GPU memory, and macOS recommends at most {most}"
    elif held > physical / 4 and psutil.virtual_memory().available < FULL * physical:
        left = gib(psutil.virtual_memory().available)
        what = f"{left} of {gib(physical)}{_label()} are left, with {gib(held)} held here"
    else:
        return ""
    return (
        f"{what}: soon macOS swaps, and each step takes several times as long; next: a smaller batch with gradient "
        f"accumulation for the same one, gradient checkpointing, shorter sequences, or other programs closed"
    )


def _sizes() -> tuple[int, int]:
    """Bytes of the machine, and those that Metal recommends as a maximum."""
    from hf_mps.metal.device import memory

    return memory.total("mps"), memory.recommended("mps") or 0


def _label() -> str:
    from hf_mps.metal.device import machine

    return machine.present().label


GUARD = MemoryBudget()
