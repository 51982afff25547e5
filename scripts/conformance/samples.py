"""PyTorch's own samples of operators, optimizers and distributions as functions to run, forward and backward.

A sample whose backward pass calls an operator that no resized sample called yet is run once more in that size. The
arguments of a gradient's operator belong together (a mean and what it is the mean of), so that they come from a forward
pass of their size, and are never resized by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from scripts.conformance import calls, layouts
from scripts.conformance.calls import Call

SAMPLES = 8
SIZES = ("one", "empty", "large")
Function = Callable[..., Any]


class Watch(Protocol):
    """What looks on while samples run: it is told the size and the pass, and says what it lacks."""

    size: str
    of_backward: bool

    def lacks(self, size: str) -> bool:
        """Whether the last sample's backward pass called an operator that has no call of this size."""


def of_operator(operator: Any, dtype: torch.dtype, watch: Watch) -> Iterator[Callable[[], None]]:
    """The samples of an OpInfo."""
    gradients = dtype.is_floating_point and operator.supports_autograd
    made = operator.sample_inputs("mps", dtype, requires_grad=gradients)
    for sample in islice(made, SAMPLES if dtype == torch.float32 else SAMPLES // 2):
        call = Call(operator.name, (sample.input, *sample.args), sample.kwargs, "")
        yield from _sized(partial(_operated, operator.op, sample.output_process_fn_grad), call, watch)


def _operated(function: Function, process: Function, *arguments: Any, **options: Any) -> Any:
    return process(function(*arguments, **options))


def of_distribution(kind: Any, watch: Watch) -> Iterator[Callable[[], None]]:
    """Numbers of a distribution with gradients; its parameters are drawn as it constrains them."""
    if getattr(kind, "has_rsample", False) is not True:
        return
    constraints = kind.arg_constraints
    drawn = {name: torch.distributions.transform_to(each)(torch.randn(4, 3)) for name, each in constraints.items()}
    given = {name: each.to("mps").requires_grad_() for name, each in drawn.items()}
    yield from _sized(lambda **parameters: kind(**parameters).rsample(), Call(kind.__name__, (), given, ""), watch)


def _sized(function: Function, call: Call, watch: Watch) -> Iterator[Callable[[], None]]:
    """The call as it is, and in each size that is missing."""
    yield partial(_passes, function, call, watch, "small")
    missing = [size for size in SIZES if watch.lacks(size)]
    for size in missing:
        resized = _resized(function, call, size)
        if resized is not None:
            yield partial(_passes, function, resized, watch, size)


def _resized(function: Function, call: Call, size: str) -> Call | None:
    def results(other: Call) -> list[Tensor | None]:
        return [each for each in tree_leaves(function(*other.arguments, **other.options)) if isinstance(each, Tensor)]

    here = call.with_tensors(lambda tensor: tensor.detach().cpu())
    resized = layouts.sized(here, size, results)
    if resized is None:
        return None
    moved = calls.on(resized, "mps")
    for old, new in zip(call.tensors, moved.tensors, strict=True):
        new.requires_grad_(old.requires_grad)
    return moved


def _passes(function: Function, call: Call, watch: Watch, size: str) -> None:
    """Forward, and backward where a result asks for it; what the device refuses is nothing that a kernel computes."""
    watch.size = size
    try:
        result = function(*call.arguments, **call.options)
        outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad]
        inputs = [each for each in call.tensors if each.requires_grad]
        if outputs and inputs:
            cotangents = [torch.randn(each.shape).to(each) for each in outputs]
            watch.of_backward = True
            torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
    except Exception:
        return
    finally:
        watch.size, watch.of_backward = "small", False


def of_optimizer(optimizer: Any) -> Iterator[Callable[[], None]]:
    """Two steps of an optimizer with each of its options, fused, foreach and plain."""
    for given in optimizer.optim_inputs_func(device="mps"):
        for way in ({"fused": True}, {"foreach": True}, {}):
            yield partial(_stepped, optimizer.optim_cls, {**given.kwargs, **way})


def _stepped(kind: Any, options: dict[str, Any]) -> None:
    weights = [torch.randn(shape, device="mps", requires_grad=True) for shape in ((7, 5), (11,), (3, 2, 4))]
    try:
        stepper = kind(weights, **options)
        for _ in range(2):
            for each in weights:
                each.grad = torch.randn_like(each)
            stepper.step()
    except Exception:
        return
