"""What a sentinel is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from weakref import WeakSet

from hf_mps.core import notices, settings
from hf_mps.core.errors import RunError
from hf_mps.core.patching import Patch
from hf_mps.layer.guards.base import Safeguard, first
from hf_mps.layer.guards.sentinels.stream import STREAM

GO_ON = f"HF_MPS_SENTINELS without {settings.STOP} to go on regardless"
STOPS = f"HF_MPS_SENTINELS={settings.STOP} ends a run there, before a checkpoint is written over a good one"
BEFORE_CHECKPOINTS: dict[str, str | Patch] = {
    "transformers.trainer:Trainer._save_checkpoint": first("_read_trainers"),
    "accelerate.accelerator:Accelerator.save_state": first("_read_accelerators"),
}
"""Where a `StoppingSentinel` has all read that there is, so that no checkpoint holds what it would stop for."""


class Sentinel(Safeguard):
    """Looks at every training on the device `mps`, whatever its loop; a subclass fills in the sentences and `look`.

    `what` says what it looks for. It speaks once for each training, in one line.
    """

    kind = "sentinel"
    repeats = True
    why: str
    """When it speaks, and whether it stops the run, with the reason; no final full stop."""

    def install(self, module: ModuleType) -> None:
        """Also see what trainings show (`stream`), which comes with torch."""
        if module.__name__ == "torch":
            STREAM.show(self, module)
        super().install(module)

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """See new losses and gradient norms of one training (a `stream.Series`), each with its optimizer step."""

    def look_at_skipped(self, training: Any, losses: Sequence[float]) -> None:
        """See the losses of several steps in a row that GradScaler skipped; `training` is its series or its scaler."""

    def before_update(self, series: Any, optimizer: Any) -> None:
        """See one of the first `stream.FIRST` optimizer steps, with its gradients, before the weights change."""

    def say(self, line: str) -> None:
        """Tell the user, with the way to switch the sentinel off."""
        off = "" if self.failure else f" (sentinel; HF_MPS_SENTINELS=-{self.name} switches it off)"
        notices.warn_user(f"{line}{off}", notices.SentinelNotice, again=True)


class StoppingSentinel(Sentinel):
    """One that warns once for each training, or ends the run: HF_MPS_SENTINELS=stop, the recipe runner."""

    def __init__(self) -> None:
        super().__init__()
        self._advice: list[str] = []

    def reset(self) -> None:
        """Also forget every training."""
        self._told: WeakSet[Any] = WeakSet()

    @contextmanager
    def stopping(self, advice: str) -> Iterator[None]:
        """Let it end a run for a while (RunError), with `advice` what to do next, as the recipe runner does."""
        self._advice.append(advice)
        try:
            yield
        finally:
            self._advice.pop()

    def _tell(self, training: Any, line: str, advice: str) -> None:
        """Warn, once for each training, or raise RunError."""
        if self._advice or settings.sentinels_stop():
            line = f"{line}; next: {self._advice[-1] if self._advice else f'{advice}, or {GO_ON}'}"
            # The error says it to the user.
            self.acted(line, aloud=False)
            raise RunError(line)
        if training not in self._told:
            self._told.add(training)
            self.acted(f"{line}, and the training goes on; next: {advice}; {STOPS}")

    def _read_trainers(self, trainer: Any, *_: Any, **__: Any) -> None:
        STREAM.read(trainer.optimizer)

    def _read_accelerators(self, accelerator: Any, *_: Any, **__: Any) -> None:
        # Accelerate has no public list of the optimizers that it has prepared.
        for optimizer in accelerator._optimizers:
            STREAM.read(optimizer)
