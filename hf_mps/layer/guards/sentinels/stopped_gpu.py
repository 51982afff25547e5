"""stopped-gpu: GPU work that macOS aborted without an error is reported once for each training, or ends the run."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from hf_mps.layer.guards.base import then
from hf_mps.layer.guards.sentinels.stream import BEFORE_CHECKPOINTS, STOPS, STREAM, StoppingSentinel
from hf_mps.metal.device import faults
from hf_mps.metal.device.no_modes import no_modes

MOST = 2**23
"""float32, in which it is read, has each whole number up to here."""
CURE = (
    "run it under `caffeinate -is` with the display asleep, or over ssh, as macOS aborts long work that delays the "
    "display; shorter rows or smaller batches make kernels shorter and take less memory"
)
"""What helped people with such Macs (ml-explore/mlx#3267)."""


class StoppedGpu(StoppingSentinel):
    """Counts on the device, in the same queue as the training, and compares the number with its own.

    macOS aborts a command buffer that runs too long, delays the display or needs memory that it cannot get. Before
    torch 2.15 no wait checks how a command buffer ended (pytorch#193571), so the program reads whatever was in memory.
    The number on the device is incremented when a loss enters its backward pass, when the gradients are complete, and
    after each batch that Trainer evaluates. It is read together with the losses, before checkpoints, and once after an
    evaluation. It keeps growing, so a lost copy to the host shows an old number. An abort that loses no increment goes
    unnoticed. The cost is two launches a step, one for each evaluated batch, and no wait in a step.

    Metal's line on stderr ("command buffer exited with error status") goes to the file descriptor, and is not watched.
    Watching takes a pipe in place of the descriptor, which turns progress bars into plain text, reorders lines, reaches
    child processes and loses the last words of a process that aborts.
    """

    name = "stopped-gpu"
    what = "GPU work that macOS aborted, whose unwritten results PyTorch before 2.15 reads without an error"
    why = f"warns once for each training, which goes on as without it; {STOPS}"
    patches = {
        **BEFORE_CHECKPOINTS,
        "transformers.trainer:Trainer.train": then("_read_trainers"),
        "transformers.trainer:Trainer.prediction_step": then("_predicted"),
        "transformers.trainer:Trainer.evaluation_loop": then("_evaluated"),
    }

    def reset(self) -> None:
        """Also begin to count anew."""
        super().reset()
        self._on_device: Any = None
        self._counted = self._read = 0

    @property
    def on(self) -> bool:
        """Also whether this torch has the fault."""
        return super().on and not _raises()

    def standing(self, started: bool, acted: str, line: int) -> tuple[str, str] | None:
        """Needless where torch raises the error itself."""
        needless = ("needless", "this torch raises an error for it") if started and _raises() else None
        return needless or super().standing(started, acted, line)

    def install(self, module: ModuleType) -> None:
        """Also count what the stream sees."""
        if module.__name__ == "torch" and not _raises():
            STREAM.canary = self
        super().install(module)

    def count(self) -> None:
        """Put an increment into the device's queue."""
        if self._on_device is None or self._counted >= MOST:
            with no_modes():
                self._on_device = torch.zeros((), device="mps")
            self._counted = self._read = 0
        with torch.no_grad():
            self._on_device.add_(1)
        self._counted += 1

    def unread(self) -> Any:
        """Return the number on the device, None where nothing was counted since it was last asked for."""
        if self._on_device is None or self._counted == self._read:
            return None
        self._read = self._counted
        return self._on_device

    def judge(self, training: Any, found: float, seen: str) -> bool:
        """Tell whether the number `found` on the device shows lost work; report it, or raise RunError to stop the run.

        `training` is a series or a Trainer, and `seen` says where in it the number was read.
        """
        if found == self._counted:
            return False
        self._on_device = None
        said = f"macOS aborted GPU work, and PyTorch continued with unwritten results (seen {seen})"
        self._tell(training, said, CURE)
        return True

    def ask(self, training: Any, seen: str) -> None:
        """Read the number by itself, and judge it."""
        number = self.unread()
        if number is not None:
            self.judge(training, number.item(), seen)

    def _predicted(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.args.device.type == "mps":
            self.count()

    def _evaluated(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.ask(trainer, "in an evaluation")


def _raises() -> bool:
    """Whether torch checks how a command buffer ended: 2.15's library has "MPS command buffer execution failed"."""
    return not faults.possible("stopped-gpu")


STOPPED_GPU = StoppedGpu()
