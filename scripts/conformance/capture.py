"""PyTorch's own samples as the aten calls that reach the device.

A sample (samples.py) calls a Python function; which aten operators it launches on the device, forward and
backward, is seen below autograd. Calls of operators with a rule are kept, each different in shapes or numbers.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_mps.core.errors import UserError
from hf_mps.core.text import summary
from scripts.conformance import layouts, opinfo, samples
from scripts.conformance.calls import Call, short

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
"""What is captured; other floating and integer types are made of the first two."""
MOST_ELEMENTS = {"small": 100_000, "one": 100_000, "empty": 100_000, "large": 8 * layouts.LARGE}
MOST_CALLS = {"small": 24, "one": 1, "empty": 1, "large": 1}
"""Calls that are kept of an operator and dtype: more differ in nothing that chooses another kernel."""


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of some overloads, with copies of their arguments from before the call.

    Of a sample that was resized those of the backward pass alone: a forward call is resized by itself, since PyTorch
    checks what a user gives it.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted, self.origin = frozenset(wanted), ""
        self.size, self.of_backward = "small", False
        self.calls: dict[tuple[str, str, str], dict[str, Call]] = defaultdict(dict)
        self.gradients: set[tuple[str, str]] = set()
        """Operators and dtypes of the backward calls since it was last emptied."""
        self.refused = ""
        """What the last sample that could not run ended with."""

    def lacks(self, size: str) -> bool:
        """Whether one of the last backward calls has no resized one yet."""
        return any((name, dtype, size) not in self.calls for name, dtype in self.gradients)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = short(func)
        of_backward = self.of_backward or "_backward" in name  # istft calls unfold's gradient forward
        if name in self.wanted and (self.size == "small" or of_backward):
            self._note(name, args, kwargs or {}, of_backward)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any, kwargs: Any, of_backward: bool) -> None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if sum(each.numel() for each in tensors) > MOST_ELEMENTS[self.size] or any(_odd(each) for each in tensors):
            return
        mine = [each for each in tensors if each.is_mps]
        if tensors and not mine:
            return
        kind = name, str(mine[0].dtype) if mine else ""
        if of_backward:
            self.gradients.add(kind)
        kept = self.calls[kind[0], kind[1], self.size]
        key = repr(tree_map(_facts, (args, kwargs)))
        if key not in kept and len(kept) < MOST_CALLS[self.size]:
            arguments, options = tree_map(_stored, (args, kwargs))
            kept[key] = Call(name, tuple(arguments), options, self.origin, self.size, of_backward)


def _odd(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or type(tensor) is not Tensor


def _facts(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype)
    return round(value, 1) if isinstance(value, float) else value


def _stored(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.device.type == "cpu" and value.dim() == 0:
        return value.item()  # PyTorch wraps it again
    return value.detach().cpu().clone(memory_format=torch.contiguous_format)


def captured(wanted: Iterable[str]) -> list[Call]:
    """The calls of these overloads that PyTorch's samples make on the device.

    Raises UserError, with the next command, where PyTorch's own test tools are not whole, and where no sample at all
    reached the device.
    """
    mode = Capture(wanted)
    for operator in opinfo.operators():
        for dtype in DTYPES:
            if dtype in operator.supported_dtypes("cpu"):
                mode.origin = f"OpInfo {operator.name}"
                _each(samples.of_operator(operator, dtype, mode), mode)
    for optimizer in opinfo.optimizers():
        mode.origin = f"OptimizerInfo {optimizer.optim_cls.__name__}"
        _each(samples.of_optimizer(optimizer), mode)
    for name in torch.distributions.__all__:
        mode.origin = f"torch.distributions.{name}"
        _each(samples.of_distribution(getattr(torch.distributions, name), mode), mode)
    if mode.wanted and not mode.calls:
        why = f", the last one ended with: {mode.refused}" if mode.refused else ""
        raise UserError(
            f"none of PyTorch's samples called {', '.join(sorted(mode.wanted)[:3])} on the device mps{why}; next, where"
            " there is no Metal: HF_MPS_SIMULATE=1"
        )
    return [call for kept in mode.calls.values() for call in kept.values()]


def _each(runs: Iterator[Callable[[], None]], mode: Capture) -> None:
    """Run them; what a sample cannot do on the device is nothing that a kernel computes."""
    opinfo.seed(20)
    random.seed(20)
    try:
        for run in runs:
            mode.gradients.clear()
            with mode:
                run()
    except Exception as error:  # of whatever kind the operator raises
        mode.refused = summary(error)
