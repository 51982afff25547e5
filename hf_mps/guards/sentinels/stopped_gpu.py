"""stopped-gpu: work that macOS ended and PyTorch goes on without is told once for each training, or ends the run."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from hf_mps.device.no_modes import no_modes
from hf_mps.guards.introspect import torch_release
from hf_mps.guards.sentinels.base import BEFORE_CHECKPOINTS, STOPS, StoppingSentinel
from hf_mps.guards.sentinels.stream import STREAM

RAISES = (2, 15)
"""The first torch whose library asks how a command buffer ended: it has "MPS command buffer execution failed"."""
MOST = 2**23
"""float32, in which it is read, has each whole number up to here."""
CURE = (
    "let the display sleep and run under `caffeinate -s`, or over ssh, as macOS ends long work for the display's sake; "
    "shorter rows or smaller batches make its kernels shorter and take less memory"
)
"""What people with such Macs found to help (ml-explore/mlx#3267)."""


class StoppedGpu(StoppingSentinel):
    """Counts on the device, in the same queue as the training, and compares where the stream reads anyway.

    macOS aborts a command buffer that runs too long, holds up the display or needs memory that is not there. Before
    torch 2.15 no wait asks how it ended (pytorch#193571): results are what lay in their memory. A number on the device
    is raised by one where a loss goes into its backward pass, where the gradients are there, and after each batch that
    Trainer evaluates. It grows for ever, so a copy to the host that is lost as well shows an old number. An abort that
    takes no increment along is not seen. No step waits for this, an evaluation once, at its end; two launches a step,
    one a batch, are the cost.

    Metal's framework writes a line ("command buffer exited with error status") to the file descriptor of stderr. It is
    not watched: that takes a pipe in its place, which would turn progress bars into plain text, mix up the order of
    lines, reach child processes, and swallow the last words of a process that aborts.
    """

    name = "stopped-gpu"
    what = "work that macOS has ended on the GPU, whose results PyTorch before 2.15 reads all the same"
    why = f"warns once for each training, which goes on as without it; {STOPS}"
    patches = {
        **BEFORE_CHECKPOINTS,
        "transformers.trainer:Trainer.train": "_trained",
        "transformers.trainer:Trainer.prediction_step": "_predicted",
        "transformers.trainer:Trainer.evaluation_loop": "_evaluated",
    }

    def __init__(self) -> None:
        super().__init__()
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

    def forget(self) -> None:
        """Also begin to count anew."""
        super().forget()
        self._on_device = None

    def count(self) -> None:
        """Put an increment into the device's queue."""
        import torch

        if self._on_device is None or self._counted >= MOST:
            with no_modes():
                self._on_device = torch.zeros((), device="mps")
            self._counted = self._read = 0
        with torch.no_grad():
            self._on_device.add_(1)
        self._counted += 1

    def unread(self) -> Any:
        """The number on the device, None where nothing was counted since it was last asked for."""
        if self._on_device is None or self._counted == self._read:
            return None
        self._read = self._counted
        return self._on_device

    def judge(self, training: Any, found: float, seen: str) -> bool:
        """Whether what was read with the number `found` is lost; tells it, or raises RunError where it is to stop.

        `training` is a series or a Trainer, and `seen` says where in it that is.
        """
        if found == self._counted:
            return False
        self._on_device = None
        said = "macOS ended work on the GPU before it was done, and PyTorch went on with what lay in memory"
        self._tell(training, f"{said}; seen {seen}", CURE)
        return True

    def ask(self, training: Any, seen: str) -> None:
        """Read the number by itself, and judge."""
        number = self.unread()
        if number is not None:
            self.judge(training, number.item(), seen)

    def _trained(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        done = stock(trainer, *args, **kwargs)
        STREAM.read(trainer.optimizer)
        return done

    def _predicted(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        done = stock(trainer, *args, **kwargs)
        if trainer.args.device.type == "mps":
            self.count()
        return done

    def _evaluated(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        done = stock(trainer, *args, **kwargs)
        self.ask(trainer, "in an evaluation")
        return done


def _raises() -> bool:
    return torch_release() >= RAISES


SENTINEL = StoppedGpu()
