"""PyTorch's own samples of operators and optimizers, as the aten calls that reach the device.

A sample (OpInfo, OptimizerInfo) calls a Python function; which aten operators it launches on the device, forward and
backward, is seen below autograd. Calls of operators with a rule are kept, each different in shapes or numbers.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_mps.kernels.conformance import opinfo
from hf_mps.kernels.conformance.calls import Call, short

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64)
"""What is captured; other floating and integer types are made of the first two."""
SAMPLES = 8
MOST_ELEMENTS = 100_000
MOST_CALLS = 24
"""Calls that are kept of an operator and dtype: more differ in nothing that chooses another kernel."""


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the calls of some overloads, with copies of their arguments from before the call."""

    def __init__(self, wanted: Iterable[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wanted, self.origin = frozenset(wanted), ""
        self.calls: dict[tuple[str, str], dict[str, Call]] = defaultdict(dict)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = short(func)
        if name in self.wanted:
            self._note(name, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if sum(each.numel() for each in tensors) > MOST_ELEMENTS or any(_odd(each) for each in tensors):
            return
        mine = [each for each in tensors if each.is_mps]
        if tensors and not mine:
            return
        kept = self.calls[name, str(mine[0].dtype) if mine else ""]
        key = repr(tree_map(_facts, (args, kwargs)))
        if key not in kept and len(kept) < MOST_CALLS:
            arguments, options = tree_map(_stored, (args, kwargs))
            kept[key] = Call(name, tuple(arguments), options, self.origin)


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

    Raises UserError, with the next command, where PyTorch's own test tools are not whole.
    """
    mode = Capture(wanted)
    for operator in opinfo.operators():
        for dtype in DTYPES:
            if dtype in operator.supported_dtypes("cpu"):
                mode.origin = f"OpInfo {operator.name}"
                _each(_samples(operator, dtype), mode)
    for optimizer in opinfo.optimizers():
        mode.origin = f"OptimizerInfo {optimizer.optim_cls.__name__}"
        _each(_steps(optimizer), mode)
    return [call for kept in mode.calls.values() for call in kept.values()]


def _each(runs: Iterator[Callable[[], None]], mode: Capture) -> None:
    """Run them; what a sample cannot do on the device is nothing that a kernel computes."""
    opinfo.seed(20)
    random.seed(20)
    try:
        for run in runs:
            with mode:
                run()
    except Exception:
        return


def _samples(operator: Any, dtype: torch.dtype) -> Iterator[Callable[[], None]]:
    gradients = dtype.is_floating_point and operator.supports_autograd
    made = operator.sample_inputs("mps", dtype, requires_grad=gradients)
    for sample in islice(made, SAMPLES if dtype == torch.float32 else SAMPLES // 2):
        yield partial(_sampled, operator, sample, gradients)


def _sampled(operator: Any, sample: Any, gradients: bool) -> None:
    try:
        result = sample.output_process_fn_grad(operator.op(sample.input, *sample.args, **sample.kwargs))
    except Exception:
        return
    if not gradients:
        return
    given = (sample.input, sample.args, sample.kwargs)
    outputs = [each for each in tree_leaves(result) if isinstance(each, Tensor) and each.requires_grad]
    inputs = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.requires_grad]
    if outputs and inputs:
        cotangents = [torch.randn(each.shape).to(each) for each in outputs]
        try:
            torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)
        except Exception:
            return


def _steps(optimizer: Any) -> Iterator[Callable[[], None]]:
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
