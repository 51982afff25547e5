"""What a sentinel is, and what every training shows it: losses, gradient norms, the moment before the weights change.

A loss is seen where `backward` is called on it, a gradient norm where somebody clips it, and both count once an
optimizer steps: those of steps that GradScaler skips are shown apart, those whose gradients somebody cleared before a
step are of no step. They stay on the device and are read together, once in READ steps, so that no step waits for the
device. A loop that never clips has its norm taken at one step in SAMPLED.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from hf_mps.core import notices, settings
from hf_mps.core.errors import RunError
from hf_mps.core.patching import Declaration, Patch, Register
from hf_mps.layer.guards.base import Safeguard, first

if TYPE_CHECKING:
    from hf_mps.layer.guards.sentinels.stopped_gpu import StoppedGpu

READ = 32
EARLY = (8, 16)
"""Steps at which the first, fewer values are read: what is wrong from the start is told soon."""
MOST = 1024
"""Values of a training that are kept unread: those of READ steps, of fewer where a step gathers many batches."""
SAMPLED = 8
FIRST = 20
"""Optimizer steps that are shown one by one, before their update."""


class Series:
    """One optimizer's steps, and what has not been read of them yet: step, value, and GradScaler's found_inf.

    The last two on the device; a fused optimizer learns only inside its kernel whether a step is taken, others have
    None in its place. `resolution` is what the losses' dtype can tell apart from 1.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.read = 0  # steps when it was last read
        self.resolution = 0.0
        self.losses: list[tuple[int, Any, Any]] = []
        self.norms: list[tuple[int, Any, Any]] = []

    @property
    def place(self) -> str:
        """Return where it is, in words."""
        return f"at optimizer step {self.steps}"

    @property
    def due(self) -> bool:
        """Return whether it is time to read."""
        return self.steps in EARLY or self.steps - self.read >= READ or len(self.losses) >= MOST


class Stream(Safeguard):
    """Collects, and shows to the sentinels what it has read; on while one of them is."""

    kind = "sentinels'"
    name = "stream"
    what = "losses and gradient norms of every training on the device"
    patches = {
        # What every loop calls.
        "torch:Tensor.backward": first("_backward"),
        "torch.nn.utils:clip_grad_norm_": "_clipped",
        "torch.amp:GradScaler.update": first("_scaler_updated"),
        "torch.optim:Optimizer.__init__": first("_begins"),
        "torch.optim:Optimizer.zero_grad": first("_begins"),
        "torch.nn:Module.zero_grad": first("_begins"),
        "torch.optim.optimizer:register_optimizer_step_pre_hook": Register("_step"),
    }

    canary: StoppedGpu | None = None
    """What counts on the device, where an abort of its work is no error: its number is read with the others."""

    def __init__(self) -> None:
        super().__init__()
        self._sentinels: list[Sentinel] = []

    def reset(self) -> None:
        """Also forget every training."""
        self._series: WeakKeyDictionary[Any, Series] = WeakKeyDictionary()
        self._losses: deque[Any] = deque(maxlen=2 * READ)  # bounded: a program may never step an optimizer
        self._norm: Any = None
        self._past = False  # whether the next loss makes the ones so far another batch's or another training's
        self._skipped: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    @property
    def on(self) -> bool:
        """Return whether anybody looks."""
        return not self.broken and any(sentinel.on for sentinel in self._sentinels)

    def show(self, sentinel: Sentinel, module: ModuleType) -> None:
        """Let `sentinel` see what comes from now on; the first one puts the stream into `module`, torch."""
        if sentinel in self._sentinels:
            return
        if not self._sentinels:
            self.install(module)
        self._sentinels.append(sentinel)

    def failed(self, error: Exception) -> None:
        """Also take every sentinel along: none of them sees anything any more."""
        super().failed(error)
        for sentinel in self._sentinels:
            sentinel.broken, sentinel.failure = True, f"the stream that it looks at {self.failure}"

    def declared(self) -> Iterator[Declaration]:
        """Return its patches, as those of a sentinel."""
        return (each._replace(kind="sentinel") for each in super().declared())

    def say(self, line: str) -> None:
        """Tell the user; only where the stream itself has failed is there anything to say."""
        notices.warn_user(line, notices.SentinelNotice)

    def begin(self, optimizer: Any) -> None:
        """Forget what an optimizer showed so far: a new training begins with it."""
        self._series.pop(plain(optimizer), None)
        self._past = True

    def read(self, optimizer: Any) -> None:
        """Read now what there is of one optimizer: before a checkpoint is written, and when its training ends."""
        series = self.series(optimizer)
        if series is not None:
            self._read(series)

    def ask(self, optimizer: Any) -> None:
        """Read the canary alone: a number that is not finite may come of work that was lost, which is then told."""
        series = self.series(optimizer)
        if self.canary is not None and series is not None:
            self.canary.safely(self.canary.ask, series, series.place)

    def series(self, optimizer: Any) -> Series | None:
        """What an optimizer, which libraries may have put something around, has shown since its training began."""
        return None if optimizer is None else self._series.get(plain(optimizer))

    def _backward(self, loss: Any, *_: Any, **__: Any) -> None:
        # A subclass (a fake tensor, one sharded over devices) need not have a number to read.
        if type(loss) is torch.Tensor and loss.device.type == "mps" and loss.numel() == 1:
            if self._past:
                self._drop()
            seen = loss.detach()
            # An element of something large would keep all of that alive.
            self._losses.append(seen if seen.untyped_storage().nbytes() <= 16 else seen.clone())
            self._count()

    def _clipped(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = stock(*args, **kwargs)
        if type(norm) is torch.Tensor and norm.device.type == "mps":
            self._norm = norm.detach()
        return norm

    def _begins(self, *_: Any, **__: Any) -> None:
        """Gradients are cleared, or an optimizer made: where a backward pass follows, what was before is past."""
        # A loop that skips a bad batch goes on so, and the loss of a training that was interrupted between backward and
        # step is not the next one's. Where no backward pass follows, a part of the model alone was cleared.
        self._past = True

    def _scaler_updated(self, scaler: Any, *_: Any, **__: Any) -> None:
        skipped = self._skipped.setdefault(scaler, [])
        if self._losses:
            skipped += self._losses
        else:  # of a step that was taken nothing is left here
            skipped.clear()
        self._drop()
        if len(skipped) >= EARLY[0]:
            self._show_skipped(scaler, _values(skipped))
            skipped.clear()

    def _count(self) -> None:
        if self.canary is not None:
            self.canary.safely(self.canary.count)

    def _lost(self, series: Series, number: float) -> bool:
        return self.canary is not None and bool(self.canary.safely(self.canary.judge, series, number, series.place))

    def _drop(self) -> None:
        self._losses.clear()
        self._norm = None
        self._past = False

    def _step(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before Optimizer.step: at once, or when its closure, which makes the gradients, has run."""
        if not self.on or torch.compiler.is_compiling():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self.safely(self._before_update, optimizer)
            return None

        def watched() -> Any:
            loss = closure()
            self.safely(self._before_update, optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _before_update(self, optimizer: Any) -> None:
        if next(gradients(optimizer), None) is None:
            return
        found_inf = getattr(optimizer, "found_inf", None)
        series = self._series.setdefault(optimizer, Series())
        series.steps += 1
        self._count()
        # With create_graph=True gradients have a graph behind them, which nothing here may keep or lengthen.
        with torch.no_grad():
            if self._norm is None and (series.steps <= EARLY[-1] or series.steps % SAMPLED == 0):
                self._norm = torch.nn.utils.get_total_norm([*gradients(optimizer)])
            if self._losses:
                series.resolution = torch.finfo(self._losses[-1].dtype).eps
            series.losses += [(series.steps, loss, found_inf) for loss in self._losses]
            if self._norm is not None:
                series.norms.append((series.steps, self._norm, found_inf))
            self._drop()
            if series.steps <= FIRST and found_inf is None:
                for sentinel in self._sentinels:
                    sentinel.safely(sentinel.before_update, series, optimizer)
            if series.due:
                self._read(series)

    def _read(self, series: Series) -> None:
        losses, norms = series.losses, series.norms
        series.losses, series.norms, series.read = [], [], series.steps
        every = [*losses, *norms]
        canary = self.canary.safely(self.canary.unread) if self.canary is not None else None
        if not every and canary is None:
            return
        # Read in one tensor: the values, then the marks of steps that may have been skipped, then the canary.
        unsure = [place for place, (_, _, found_inf) in enumerate(every) if found_inf is not None]
        scalars = [*(value for _, value, _ in every), *(every[place][2] for place in unsure)]
        values = _values(scalars if canary is None else [*scalars, canary])
        if canary is not None and self._lost(series, values.pop()):
            # The other numbers are not what was computed either.
            return
        skipped = {place for place, found_inf in zip(unsure, values[len(every) :], strict=True) if found_inf}
        numbers = [(step, values[place]) for place, (step, _, _) in enumerate(every)]
        taken = [place for place in range(len(every)) if place not in skipped]
        of_losses = [numbers[place] for place in taken if place < len(losses)]
        of_norms = [numbers[place] for place in taken if place >= len(losses)]
        for sentinel in self._sentinels:
            sentinel.safely(sentinel.look, series, of_losses, of_norms)
        if len(losses) >= EARLY[0] and not taken:
            self._show_skipped(series, values[: len(losses)])

    def _show_skipped(self, training: Any, losses: list[float]) -> None:
        for sentinel in self._sentinels:
            sentinel.safely(sentinel.look_at_skipped, training, losses)


def plain(optimizer: Any) -> Any:
    """Return the optimizer of torch's within what libraries put around one, as Accelerate does."""
    while "optimizer" in vars(optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def gradients(optimizer: Any) -> Iterator[Any]:
    """The gradients that lie on the device, dense and of real numbers; others (a head on the CPU) are no business."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            there = gradient is not None and gradient.device.type == "mps" and gradient.layout == torch.strided
            if there and gradient.is_floating_point():
                yield gradient.detach()


def _values(scalars: Sequence[Any]) -> list[float]:
    """Numbers of the device, in one read."""
    device = scalars[0].device
    found: list[float] = torch.stack([each.detach().reshape(()).float().to(device) for each in scalars]).tolist()
    return found


STREAM = Stream()


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
