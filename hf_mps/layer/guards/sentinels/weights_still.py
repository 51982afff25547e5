"""weights-still: after the first optimizer steps, trained weights that have a gradient and did not move."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from hf_mps.core.patching import Register
from hf_mps.layer.guards.base import first
from hf_mps.layer.guards.sentinels.stream import FIRST, Sentinel
from hf_mps.layer.guards.training_hooks import MODEL_PREPARED, STEPPED

STEPS = 3
SAMPLE = 2**22
"""Elements of a weight that are searched for its largest gradient; of a larger one every n-th."""
ROUNDING = 20
"""A step is judged where it should change a weight by that many times what its dtype resolves."""
STOOD = 3
"""A weight is told of where so many judged elements stood and none moved.

Momentum and weight decay may cancel a gradient: of elements that are due to move by little more than ROUNDING, as in a
warmup, one in twenty stands by chance.
"""
FEEBLE = 1e-3
"""Share of SGD's and of Adam's step that an optimizer with its own rule is held to, the smaller of both.

Adadelta's first is three times that of Adam's, LARS takes as much of SGD's, RAdam begins as SGD.
"""


@dataclass
class _Watch:
    """What was seen of one training: for each step its weights, the step's settings, and what was picked.

    The weights by reference: those of a training that was given up belong to nobody. Settings (5, weights) lie on the
    CPU; gradients, weights before and after (3, 2 * weights) stay on the device, and are read once.
    """

    seen: list[tuple[list[ref[Any]], Any, Any]] = field(default_factory=list)
    done: bool = False


@dataclass
class _Step:
    """A step that has begun: whose it is, and how its weights are compared when it is over."""

    optimizer: ref[Any]
    watch: _Watch
    weights: list[ref[Any]]
    compare: Callable[[list[Any]], tuple[Any, Any]]


class WeightsStill(Sentinel):
    """Looks at two elements of each weight, those with its least and its greatest gradient, before and after a step."""

    name = "weights-still"
    what = "trained weights that have a gradient and that the first optimizer steps leave as they were"
    why = (
        f"looks at {STEPS} of the first {FIRST} steps; warns, because some optimizers gather several steps before they"
        " change anything"
    )
    patches = {
        # One for all that stays: a hook of an optimizer's own could not take itself away while others are called.
        STEPPED: Register("_stepped"),
        # The models that accelerate prepares, Trainer's among them, to call weights by their names.
        MODEL_PREPARED: first("_prepared"),
    }

    def reset(self) -> None:
        """Also forget every training."""
        self._watches: WeakKeyDictionary[Any, _Watch] = WeakKeyDictionary()
        self._models: list[ref[Any]] = []
        self._now: _Step | None = None

    def before_update(self, series: Any, optimizer: Any) -> None:
        """Note the elements to watch, and compare them when the step is over."""
        watch = self._watches.setdefault(series, _Watch())
        # An optimizer may make its gradients several times in a step: the first ones are before every change.
        if watch.done or (self._now is not None and self._now.optimizer() is optimizer):
            return
        groups = list(_judged(optimizer))
        weights = [ref(weight) for weight, _ in groups]
        self._now = _Step(ref(optimizer), watch, weights, _compared(optimizer, groups)) if groups else None

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        now = self._now
        if now is not None and now.optimizer() is optimizer:  # else that one's step ended in an error
            self._now = None
            self.safely(self._look, now, optimizer)

    def _look(self, now: _Step, optimizer: Any) -> None:
        weights = [weight() for weight in now.weights]
        if any(weight is None for weight in weights):
            return
        now.watch.seen.append((now.weights, *now.compare(weights)))
        if len(now.watch.seen) == STEPS:
            self._tell(now.watch, optimizer)

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """Judge a training that ends before its third step by what there is."""
        watch = self._watches.get(series)
        if watch is not None and watch.seen and not watch.done:
            self._tell(watch, None)

    def _prepared(self, accelerator: Any, model: Any, *_: Any, **__: Any) -> None:
        self._models = [each for each in self._models if each() is not None] + [ref(model)]

    def _tell(self, watch: _Watch, optimizer: Any) -> None:
        """Read what was seen, once, and warn of the weights that were still whenever they were judged."""
        watch.done = True
        seen, watch.seen = watch.seen, []
        # One read for all: each is a wait for the device.
        read = torch.cat([picked for _, _, picked in seen], dim=1).cpu()
        values = read.split_with_sizes([2 * len(group) for group, _, _ in seen], dim=1)
        weights: dict[int, Any] = {}
        moved: set[int] = set()
        stood: Counter[int] = Counter()
        for (group, settings, _), picked in zip(seen, values, strict=True):
            for weight, due, still in zip((each() for each in group), *_verdicts(settings, picked), strict=True):
                if due and weight is not None:
                    weights[id(weight)] = weight
                    stood[id(weight)] += still
                    if still < due:
                        moved.add(id(weight))
        left = [weight for key, weight in weights.items() if key not in moved and stood[key] >= STOOD]
        if left:
            names = self._names(optimizer)
            first = ", ".join(f"{names.get(id(each), 'a weight')} {list(each.shape)}" for each in left[:3])
            self.acted(
                f"{len(left)} of {len(weights)} trained weights have gradients and did not move in the first"
                f" {len(seen)} optimizer steps: {first}{', …' if len(left) > 3 else ''}; next: make them contiguous,"
                " or another optimizer; hf_mps.guards.report() lists the faults that are known"
            )

    def _names(self, optimizer: Any) -> dict[int, str]:
        """Names of weights by identity: of the models that accelerate prepared, and those that the optimizer has."""
        models = [model for model in (each() for each in self._models) if model is not None]
        names = {id(weight): name for model in models for name, weight in model.named_parameters()}
        for group in optimizer.param_groups if optimizer is not None else ():
            names |= {id(weight): str(name) for weight, name in zip(group["params"], group.get("param_names", ()))}  # noqa: B905  the optimizer may lack names
        return names


def _judged(optimizer: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the weights on the device that a step should change, each with its group's settings."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        # So it is before a warmup's first step, and in an optimizer with its own rate.
        if rate is None or not float(rate) > 0:
            continue
        for weight in group["params"]:
            gradient = weight.grad
            there = gradient is not None and weight.device.type == gradient.device.type == "mps"
            dense = there and gradient.layout == torch.strided and weight.is_floating_point()
            if dense and 0 < weight.numel() < 2**31:
                yield weight, group


def _compared(optimizer: Any, groups: list[tuple[Any, dict[str, Any]]]) -> Callable[[list[Any]], tuple[Any, Any]]:
    """Pick two elements of each weight now; the function returned picks them again, after the step.

    It returns what `_Watch.seen` has of a step. Nothing in here waits for the device.
    """
    picks = [_ends(weight.grad) for weight, _ in groups]

    def picked(of: list[Any]) -> Any:
        return torch.cat([_sample(each).index_select(0, pick).float() for each, pick in zip(of, picks, strict=True)])

    gradients, before = picked([weight.grad for weight, _ in groups]), picked([weight for weight, _ in groups])
    rows = [_settings(optimizer, weight, group) for weight, group in groups]
    settings = torch.tensor(rows, dtype=torch.float32, device="cpu").t()
    return lambda weights: (settings, torch.stack((gradients, before, picked(weights))))


def _ends(gradient: Any) -> Any:
    """Return the places of the greatest and the least element in its sample, of shape (2,)."""
    sample = _sample(gradient)
    # Not those of the largest absolute values, which would be a copy of the sample, and the step's peak.
    return torch.stack((sample.argmax(), sample.argmin()))


def _verdicts(settings: Any, picked: Any) -> tuple[list[int], list[int]]:
    """For each weight of a step how many of its two elements were due to move, and how many of those stood."""
    by_rate, by_gradient, floor, decay, resolved = settings.unsqueeze(-1)
    gradients, before, after = picked.view(3, -1, 2)
    gradients = gradients.abs()
    due = torch.minimum(by_rate * gradients / (gradients + floor), by_gradient * gradients)
    judged = gradients.isfinite() & (due > ROUNDING * resolved * before.abs())
    decayed = (decay > 0) & ((after - before * (1 - decay)).abs() <= resolved * before.abs())
    return judged.sum(-1).tolist(), (judged & ((after == before) | decayed)).sum(-1).tolist()


def _sample(tensor: Any) -> Any:
    # Of a weight that FSDP2 shards this process has a part.
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    flat = part.detach().reshape(-1)
    return flat[:: flat.numel() // SAMPLE + 1]


def _settings(optimizer: Any, weight: Any, group: dict[str, Any]) -> tuple[float, float, float, float, float]:
    """Return what a step changes a weight by, and what is known of the weight.

    Of a step: its size whatever the gradient's, its size for a gradient of 1 (it is the smaller of both), and the
    gradient, an optimizer's eps, below which the first is smaller. Of the weight: the share that a decoupled decay
    takes, and what its dtype resolves.
    """
    rate, resolution = float(group["lr"]), torch.finfo(weight.dtype).eps
    known = (rate * float(group.get("weight_decay") or 0.0), resolution)
    eps = group.get("eps")
    floor = max(eps, 1e-30) if isinstance(eps, float) else 1e-8
    if "dampening" in group:
        return math.inf, rate, 1e-30, 0.0, resolution  # SGD, whose decay is a part of the gradient
    if "amsgrad" in group or type(optimizer).__name__.lower().startswith(("adamw", "lion")):
        return rate, math.inf, floor, *known  # Adam and its like
    feeble = rate * float(group.get("d", 1.0)) * FEEBLE  # d is what Prodigy and D-Adaptation multiply lr by
    return feeble, feeble, floor, *known
