"""weights-still: after the first optimizer steps, trained weights that have a gradient and did not move."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary, ref

from hf_mps.installed import around
from hf_mps.sentinels.sentinel import Sentinel
from hf_mps.sentinels.stream import FIRST

STEPS = 3
SAMPLE = 2**22
"""Elements of a weight that are searched for its largest gradient; of a larger one every n-th."""
ROUNDING = 20
"""A step is judged where it should change a weight by that many times what its dtype resolves."""
SHARE = 1e-3
"""Of the change that is due: less is none."""


@dataclass
class _Watch:
    """What was seen of one training: for each step its weights, and on the device which were judged and were still."""

    seen: list[tuple[list[Any], Any, Any]] = field(default_factory=list)
    done: bool = False


class WeightsStill(Sentinel):
    """Looks at one element of each weight: the one with the largest gradient, before and after a step."""

    name = "weights-still"
    what = "trained weights that have a gradient and that the first optimizer steps leave as they were"
    why = (
        f"looks at {STEPS} of the first {FIRST} steps; warns, because some optimizers gather several steps before they"
        " change anything"
    )

    def __init__(self) -> None:
        super().__init__()
        self._watches: WeakKeyDictionary[Any, _Watch] = WeakKeyDictionary()
        self._models: list[ref[Any]] = []
        self._now: Callable[[Any], None] | None = None

    def install(self, module: ModuleType) -> None:
        """Also note the models that accelerate prepares, Trainer's among them, to call weights by their names."""
        super().install(module)
        if module.__name__ == "torch":
            from torch.optim.optimizer import register_optimizer_step_post_hook

            # One for all that stays: a hook of an optimizer's own could not take itself away while others are called.
            register_optimizer_step_post_hook(self._stepped)
        else:
            around(self, module.Accelerator, "prepare_model", self._prepared)

    def forget(self) -> None:
        """Also forget every training."""
        super().forget()
        self._watches.clear()

    def before_update(self, series: Any, optimizer: Any) -> None:
        """Note the elements to watch, and compare them when the step is over."""
        watch = self._watches.setdefault(series, _Watch())
        # An optimizer may make its gradients several times in a step: the first ones are before every change.
        groups = [] if watch.done or self._now else list(_judged(optimizer))
        if not groups:
            return
        compare = _compared(groups)

        def after(stepped: Any) -> None:
            if stepped is not optimizer:  # that one's step ended in an error
                return
            watch.seen.append(([weight for weight, _ in groups], *compare()))
            if len(watch.seen) == STEPS:
                self._tell(watch, optimizer)

        self._now = after

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if self._now is not None:
            after, self._now = self._now, None
            after(optimizer)

    def look(self, series: Any, losses: Sequence[tuple[int, float]], norms: Sequence[tuple[int, float]]) -> None:
        """Judge a training that ends before its third step by what there is."""
        watch = self._watches.get(series)
        if watch is not None and watch.seen and not watch.done:
            self._tell(watch, None)

    def _prepared(self, stock: Callable[..., Any], accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._models = [each for each in self._models if each() is not None] + [ref(model)]
        return stock(accelerator, model, *args, **kwargs)

    def _tell(self, watch: _Watch, optimizer: Any) -> None:
        """Read what was seen, once, and warn of the weights that were still whenever they were judged."""
        import torch

        watch.done = True
        seen, watch.seen = watch.seen, []
        flags = torch.cat([torch.stack((judged, still)).flatten() for _, judged, still in seen]).tolist()
        weights: dict[int, Any] = {}
        moved: set[int] = set()
        for group, _, _ in seen:
            judged, still, flags = flags[: len(group)], flags[len(group) : 2 * len(group)], flags[2 * len(group) :]
            for weight, due, none in zip(group, judged, still, strict=True):
                if due:
                    weights[id(weight)] = weight
                if due and not none:
                    moved.add(id(weight))
        left = [weight for key, weight in weights.items() if key not in moved]
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
    """The weights that a step should change, each with its group's settings."""
    import torch

    for group in optimizer.param_groups:
        rate = group.get("lr")
        if rate is None or not float(rate) > 0:  # before a warmup's first step, or an optimizer with a rate of its own
            continue
        for weight in group["params"]:
            gradient = weight.grad
            if gradient is not None and gradient.layout == torch.strided and 0 < weight.numel() < 2**31:
                yield weight, group


def _compared(groups: list[tuple[Any, dict[str, Any]]]) -> Callable[[], tuple[Any, Any]]:
    """Pick an element of each weight now; the function returned says for each whether it was due to move, and stood."""
    import torch

    picks = [_sample(weight.grad).abs().argmax().view(1) for weight, _ in groups]

    def picked(of: list[Any]) -> Any:
        return torch.cat([_sample(each).index_select(0, pick).float() for each, pick in zip(of, picks, strict=True)])

    weights = [weight for weight, _ in groups]
    gradients, before = picked([weight.grad for weight in weights]).abs(), picked(weights)
    due, decay, resolved = (
        torch.tensor(column, device=before.device, dtype=torch.float32)
        for column in zip(*(_settings(weight, group) for weight, group in groups), strict=True)
    )
    adaptive = torch.tensor(["betas" in group for _, group in groups], device=before.device)
    # Adam and its like step by the learning rate, whatever the gradient's size; SGD in proportion to it.
    due = due * torch.where(adaptive, gradients / (gradients + 1e-8), gradients)
    judged = gradients.isfinite() & (due > ROUNDING * resolved * before.abs())

    def compare() -> tuple[Any, Any]:
        after = picked(weights)
        change = torch.minimum((after - before).abs(), (after - before * (1 - decay)).abs())
        return judged, change <= SHARE * due + resolved * before.abs()

    return compare


def _sample(tensor: Any) -> Any:
    flat = tensor.detach().reshape(-1)
    return flat[:: flat.numel() // SAMPLE + 1]


def _settings(weight: Any, group: dict[str, Any]) -> tuple[float, float, float]:
    """Learning rate, share that a decoupled weight decay takes, and what the dtype resolves."""
    import torch

    rate = float(group["lr"])
    return rate, rate * float(group.get("weight_decay") or 0.0), torch.finfo(weight.dtype).eps


SENTINEL = WeightsStill()
