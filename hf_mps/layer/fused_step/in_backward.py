"""Each weight steps as soon as the backward pass has its gradient, which is then let go; halves step by chance.

Gradients take as much memory as the weights, and all stand there at once only because the optimizer comes last. Here
the optimizer that Trainer made steps for one weight at a time, so its state, and a checkpoint of it, is what it always
is. Weights in bfloat16 step in float32, some million elements at a time, and are rounded up or down with the
probability of their distance: rounded to the nearest, a step below a 512th of a weight would be none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hf_mps.layer.guards.sentinels.stream import plain

PIECE = 2**22
"""Elements of a weight in halves that step at once: 16 MiB in float32, and as much for each tensor of their state."""
DROPPED = 16
"""Digits of float32 that bfloat16 has not."""
COUNTER = "step"
"""What torch's optimizers call the one part of a weight's state that is no tensor of its size."""


class InBackward:
    """The optimizer's step for one weight at a time; `attach` has the backward pass take it.

    With `settle` a gradient is only measured: `norms` gets its norm, and it is let go.
    """

    def __init__(self) -> None:
        self.norms: dict[int, Tensor] = {}
        self.settle: Callable[[Tensor], None] | None = None
        self.measuring = False
        self._places: dict[int, int] = {}
        self._groups: dict[int, dict[str, Any]] = {}
        self._optimizer: Any = None

    def attach(self, weights: Iterable[Tensor]) -> None:
        """Hook into the backward pass of `weights`, those of them that train."""
        for weight in weights:
            if weight.requires_grad:
                if not weight.is_contiguous():
                    weight.data = weight.data.contiguous()
                self._places[id(weight)] = len(self._places)
                weight.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def begin(self, optimizer: Any, *, measuring: bool, settle: Callable[[Tensor], None] | None = None) -> None:
        """The next backward pass measures, or steps by `optimizer` after `settle`, which may change the gradient."""
        self.norms, self.measuring, self.settle = {}, measuring, settle
        self._optimizer = plain(optimizer)
        self._groups = {id(weight): group for group in self._optimizer.param_groups for weight in group["params"]}

    def norm(self) -> Tensor:
        """The norm of all gradients of the pass, as `torch.nn.utils.get_total_norm` puts those of single ones together.

        0 where there was none.
        """
        if not self.norms:
            return torch.tensor(0.0)
        total: Tensor = torch.linalg.vector_norm(torch.stack([self.norms[place] for place in sorted(self.norms)]))
        return total

    def _arrived(self, weight: Tensor) -> None:
        gradient = weight.grad
        if gradient is None:
            return
        with torch.no_grad():
            # In float32; of halves piece by piece, since float32 of all would be twice the gradient.
            whole = gradient.dtype == torch.float32
            pieces = [gradient] if whole else torch.split(gradient.reshape(-1), PIECE)
            norms = [torch.linalg.vector_norm(each.float()) for each in pieces]
            total: Tensor = norms[0] if whole else torch.linalg.vector_norm(torch.stack(norms))
            self.norms[self._places[id(weight)]] = total
            if not self.measuring and id(weight) in self._groups:
                if self.settle is not None:
                    self.settle(weight)
                self._step(weight, self._groups[id(weight)])
        weight.grad = None

    def _step(self, weight: Tensor, group: dict[str, Any]) -> None:
        optimizer = self._optimizer
        if weight.dtype != torch.bfloat16:
            take(optimizer, weight, group)
            return
        gradient = weight.grad
        assert gradient is not None
        state = optimizer.state.pop(weight, {})
        flat, gradients, kept = weight.detach().view(-1), gradient.reshape(-1), dict(state)
        for start in range(0, flat.numel(), PIECE):
            part = slice(start, start + PIECE)
            piece = torch.nn.Parameter(flat[part].float())
            piece.grad = gradients[part].float()
            if state:
                optimizer.state[piece] = {name: _piece(name, value, part) for name, value in state.items()}
            take(optimizer, piece, group)
            flat[part] = rounded(piece.detach())
            # The piece's state goes into the weight's, in the weight's dtype.
            for name, value in optimizer.state.pop(piece, {}).items():
                if not isinstance(value, Tensor) or name == COUNTER:
                    kept[name] = value
                else:
                    kept.setdefault(name, torch.zeros_like(weight)).view(-1)[part] = rounded(value)
        optimizer.state[weight] = kept


def take(optimizer: Any, weight: Tensor, group: dict[str, Any]) -> None:
    """`optimizer`'s step for `weight` alone, with the settings of `group`; hooks on its steps are not called.

    Those belong to the whole step, which the training loop takes as ever, when no gradient is left.
    """
    step = type(optimizer).step
    # Without what Optimizer.profile_hook_step puts around it, which calls the hooks.
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [weight]}]
    try:
        step(optimizer)
    finally:
        optimizer.param_groups = groups


def rounded(values: Tensor) -> Tensor:
    """Float32 as bfloat16: each up or down with the probability of its distance, so that their mean is the value.

    Draws from the device's generator. A bfloat16 is the upper half of a float32's digits: a random lower half is added,
    which carries into the upper one as often as it is due, and is cut off.
    """
    digits = values.view(torch.int32)
    chance = torch.randint(0, 2**DROPPED, digits.shape, dtype=torch.int32, device=values.device)
    return chance.add_(digits).bitwise_and_(-(2**DROPPED)).view(torch.float32).to(torch.bfloat16)


def _piece(name: str, value: Any, part: slice) -> Any:
    """Return a part of a state's tensor in float32, or its counter."""
    if not isinstance(value, Tensor):
        return value
    # A copy of the counter, as the step of each part counts.
    return value.clone() if name == COUNTER else value.view(-1)[part].float()
