"""What every training shows, whatever its loop: losses, gradient norms, and the moment before the weights change.

A loss is seen where `backward` is called on it, a gradient norm where somebody clips it, and both count once an
optimizer steps: those of steps that GradScaler skips are shown apart. They stay on the device and are read together,
once in READ steps, so that no step waits for the device. A loop that never clips has its norm taken at one step in
SAMPLED.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from hf_mps.installed import Installed, around
from hf_mps.sentinels.sentinel import Sentinel

READ = 32
EARLY = (8, 16)
"""Steps at which the first, fewer values are read: what is wrong from the start is told soon."""
SAMPLED = 8
FIRST = 20
"""Optimizer steps that are shown one by one, before their update."""


class Series:
    """One optimizer's steps, and what has not been read of them yet: step, value, and GradScaler's found_inf.

    The last two on the device; a fused optimizer learns only inside its kernel whether a step is taken, others have
    None in its place.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.losses: list[tuple[int, Any, Any]] = []
        self.norms: list[tuple[int, Any, Any]] = []

    @property
    def due(self) -> bool:
        """Whether it is time to read."""
        return self.steps in EARLY or max(len(self.losses), len(self.norms)) >= READ


class Stream(Installed):
    """Collects, and shows to the sentinels what it has read; on while one of them is."""

    name = "stream"
    what = "losses and gradient norms of every training on the device"

    def __init__(self) -> None:
        super().__init__()
        self._sentinels: list[Sentinel] = []
        self._series: WeakKeyDictionary[Any, Series] = WeakKeyDictionary()
        self._losses: deque[Any] = deque(maxlen=2 * READ)  # bounded: a program may never step an optimizer
        self._skipped: list[Any] = []
        self._norm: Any = None

    @property
    def on(self) -> bool:
        """Whether anybody looks."""
        return any(sentinel.on for sentinel in self._sentinels)

    def show(self, sentinel: Sentinel, module: ModuleType) -> None:
        """Let `sentinel` see what comes from now on; the first one puts the stream into `module`, torch."""
        if module.__name__ != "torch" or sentinel in self._sentinels:
            return
        if not self._sentinels:
            self.install(module)
        self._sentinels.append(sentinel)

    def install(self, module: ModuleType) -> None:
        """Put it around what every loop calls."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook  # torch.optim hides its modules

        around(self, module.Tensor, "backward", self._backward)
        around(self, module.nn.utils, "clip_grad_norm_", self._clipped)
        around(self, module.amp.GradScaler, "update", self._scaler_updated)
        register_optimizer_step_pre_hook(self._step)

    def read_all(self) -> None:
        """Read now what there is: before a checkpoint is written, and when a training ends."""
        for series in list(self._series.values()):
            self._read(series)

    def forget(self) -> None:
        """Forget every training."""
        super().forget()
        self._series.clear()
        self._drop()

    def _backward(self, stock: Callable[..., Any], loss: Any, *args: Any, **kwargs: Any) -> Any:
        if loss.device.type == "mps" and loss.numel() == 1:
            seen = loss.detach()
            # An element of something large would keep all of that alive.
            self._losses.append(seen if seen.untyped_storage().nbytes() <= 16 else seen.clone())
        return stock(loss, *args, **kwargs)

    def _clipped(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        norm = stock(*args, **kwargs)
        self._norm = norm.detach()
        return norm

    def _scaler_updated(self, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._skipped += self._losses  # of a step that was taken nothing is left here
        self._drop()
        if len(self._skipped) >= EARLY[0]:
            self._show_skipped(_values(self._skipped))
            self._skipped.clear()
        return stock(*args, **kwargs)

    def _drop(self) -> None:
        self._losses.clear()
        self._norm = None

    def _step(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before Optimizer.step: at once, or when its closure, which makes the gradients, has run."""
        import torch

        if not self.on or torch.compiler.is_compiling():
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._before_update(optimizer)
            return None

        def watched() -> Any:
            loss = closure()
            self._before_update(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _before_update(self, optimizer: Any) -> None:
        first = next(_gradients(optimizer), None)
        if first is None or first.device.type != "mps":
            self._drop()
            return
        found_inf = getattr(optimizer, "found_inf", None)
        series = self._series.setdefault(optimizer, Series())
        series.steps += 1
        if self._norm is None and (series.steps <= EARLY[-1] or series.steps % SAMPLED == 0):
            self._norm = _norm(optimizer)
        series.losses += [(series.steps, loss, found_inf) for loss in self._losses]
        if self._norm is not None:
            series.norms.append((series.steps, self._norm, found_inf))
        self._drop()
        self._skipped.clear()
        if series.steps <= FIRST and found_inf is None:
            for sentinel in self._sentinels:
                if sentinel.on:
                    sentinel.before_update(series, optimizer)
        if series.due:
            self._read(series)

    def _read(self, series: Series) -> None:
        losses, norms = series.losses, series.norms
        series.losses, series.norms = [], []
        every = [*losses, *norms]
        if not every:
            return
        values = _values([value for _, value, _ in every])
        unsure = [place for place, (_, _, found_inf) in enumerate(every) if found_inf is not None]
        overflowed = _values([every[place][2] for place in unsure]) if unsure else []
        skipped = {place for place, found_inf in zip(unsure, overflowed, strict=True) if found_inf}
        numbers = [(step, values[place]) for place, (step, _, _) in enumerate(every)]
        taken = [place for place in range(len(every)) if place not in skipped]
        for sentinel in self._sentinels:
            if sentinel.on:
                sentinel.look(
                    series,
                    [numbers[place] for place in taken if place < len(losses)],
                    [numbers[place] for place in taken if place >= len(losses)],
                )
        if len(losses) >= EARLY[0] and not taken:
            self._show_skipped(values[: len(losses)])

    def _show_skipped(self, losses: list[float]) -> None:
        for sentinel in self._sentinels:
            if sentinel.on:
                sentinel.look_at_skipped(losses)


def _gradients(optimizer: Any) -> Iterator[Any]:
    every = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return (gradient for gradient in every if gradient is not None)


def _norm(optimizer: Any) -> Any:
    import torch

    return torch.nn.utils.get_total_norm([each for each in _gradients(optimizer) if each.layout == torch.strided])


def _values(scalars: Sequence[Any]) -> list[float]:
    """Numbers of the device, in one read."""
    import torch

    device = scalars[0].device
    found: list[float] = torch.stack([each.detach().reshape(()).float().to(device) for each in scalars]).tolist()
    return found


STREAM = Stream()
