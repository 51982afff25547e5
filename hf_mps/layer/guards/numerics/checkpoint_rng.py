"""checkpoint-rng: gradient checkpointing replays the device's random numbers."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Give
from hf_mps.layer.guards.base import Guard


class _Device(nullcontext[None]):
    """`torch.mps.device(0)`: the one Metal device is always the current one. As torch.cuda.device."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        self.idx = 0
        # A storage that is moved to the device asks for it as well (torch/_utils.py, _to).
        asks = sys._getframe(1).f_globals.get("__name__")
        if asks == "torch.utils.checkpoint" and not Guard.trying:
            CHECKPOINT_RNG.safely(CHECKPOINT_RNG.replayed)


NAMES = {"_initialized": True, "device": _Device}


class CheckpointRng(Guard):
    """Gives torch.mps the two names by which torch.utils.checkpoint finds a device's random numbers."""

    name = "checkpoint-rng"
    what = "torch.utils.checkpoint does not replay the device's random numbers, so dropout's gradients are wrong"
    until = "the oldest supported torch has pull request #194478"
    patches = {f"torch.mps:{name}": Give(value) for name, value in NAMES.items()}

    _ours: tuple[str, ...] = ()

    def trial(self) -> Choice[bool]:
        """Whether a checkpointed dropout on the device, without this guard, has another gradient than a plain one."""
        self.switched(False)
        try:
            wrong = not _replays()
        finally:
            self.switched(self.on)
        if not wrong:
            return Choice(False, "this torch replays the device's random numbers by itself")
        if self.on and not _replays():
            return Choice(True, "this torch replays other random numbers, and the guard cannot cure it")
        return Choice(
            True, "tried on the device: this torch replays other random numbers, and the right ones with the guard"
        )

    def install(self, module: ModuleType) -> None:
        """Give `torch.mps` what it lacks of the two names."""
        self._ours = tuple(name for name in NAMES if not hasattr(module.mps, name))
        super().install(module)

    def replayed(self) -> None:
        """Note that a checkpointed function was replayed."""
        self.acted("gradient checkpointing replays the device's random numbers", aloud=False)

    def switched(self, on: bool) -> None:
        """Put the names there, or take them away."""
        for name, value in NAMES.items():
            if name in self._ours and on:
                setattr(torch.mps, name, value)
            elif name in self._ours and hasattr(torch.mps, name):
                delattr(torch.mps, name)


def _replays() -> bool:
    """Return whether a checkpointed dropout's gradient is that of its output; leaves the generators as they were."""
    from torch.utils.checkpoint import checkpoint

    with torch.random.fork_rng([0], device_type="mps"):
        x = torch.ones(64, device="mps", requires_grad=True)
        y: Any = checkpoint(lambda value: torch.nn.functional.dropout(value * value, 0.5), x, use_reentrant=False)
        y.sum().backward()
        assert x.grad is not None
        return bool(torch.equal(x.grad, 2 * y.detach()))


CHECKPOINT_RNG = CheckpointRng()
