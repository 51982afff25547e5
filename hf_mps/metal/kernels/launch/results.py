"""Where a pointwise operator writes: a new output as TensorIterator makes it, or a tensor that is given, checked.

Each is for `out_rule(..., outputs=…)`: it gets the tensor to write to, or None, and the operator's arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.iterator import broadcast, result
from hf_mps.metal.kernels.rules import refuse_misfit
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import span

Operand = Tensor | complex
"""An input of two: a number comes as Python's where PyTorch wrapped one."""


def written(target: Tensor | None, dtype: torch.dtype, *operands: Operand, exact: bool = False) -> Tensor:
    """The output: `target` where it has the shape of the result and a dtype that takes `dtype`, else a new one.

    `exact` is for operators whose output has to be of `dtype` itself.

    Raises:
        NoRule: PyTorch refuses the arguments, or `target` has another shape (which PyTorch resizes).
    """
    inputs = [each for each in operands if isinstance(each, Tensor)]
    if target is None:
        return result(dtype, *inputs)
    shape = broadcast(*(tuple(each.shape) for each in inputs))
    if shape is None or (tuple(target.shape) != shape and target.numel()):
        raise NoRule("the result has another shape than what it is written to")
    if target.dtype != dtype and (exact or not torch.can_cast(dtype, target.dtype)):
        raise NoRule("PyTorch refuses the arguments: the result's dtype can't be cast to the output's")
    if any(_overlap(target, each) for each in inputs):
        raise NoRule("an input and the output share memory in part")
    if tuple(target.shape) != shape:
        target.resize_(shape)
    return target


def _overlap(target: Tensor, given: Tensor) -> bool:
    """They share storage, and are not the same elements in the same order: PyTorch refuses some of these cases."""
    if not given.is_mps or target.untyped_storage().data_ptr() != given.untyped_storage().data_ptr():
        return False
    if target.data_ptr() == given.data_ptr() and target.shape == given.shape and target.stride() == given.stride():
        return False
    return (
        target.numel() > 0 and given.numel() > 0 and _end(target) > given.data_ptr() and _end(given) > target.data_ptr()
    )


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + span(tensor) * tensor.element_size()


def common(first: Operand, second: Operand) -> torch.dtype:
    """The dtype that two inputs are promoted to; numbers count less than tensors (torch.result_type)."""
    if isinstance(first, Tensor) and isinstance(second, Tensor) and first.dtype == second.dtype:
        return first.dtype
    return torch.result_type(first, second)


def floating(dtype: torch.dtype) -> torch.dtype:
    """The dtype of a float function's result: whole numbers give the default dtype."""
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()


def as_input(target: Tensor | None, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """One input, and the output has its dtype."""
    if target is None:
        return torch.empty_like(self)
    return written(target, self.dtype, self, exact=True)


def as_float(target: Tensor | None, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """One input, and whole numbers become floats."""
    return written(target, floating(self.dtype), self)


def as_truth(target: Tensor | None, self: Tensor, *_: Any, **__: Any) -> Tensor:
    """One input, and the output is of bool."""
    return written(target, torch.bool, self)


def as_common(target: Tensor | None, self: Operand, other: Operand, *_: Any, **__: Any) -> Tensor:
    """Two inputs, promoted to one dtype."""
    return written(target, common(self, other), self, other)


def as_common_float(target: Tensor | None, self: Operand, other: Operand, *_: Any, **__: Any) -> Tensor:
    """Two inputs, promoted to one dtype, and whole numbers become floats."""
    return written(target, floating(common(self, other)), self, other)


def as_compared(target: Tensor | None, self: Operand, other: Operand, *_: Any, **__: Any) -> Tensor:
    """Two inputs, and the output is of bool."""
    return written(target, torch.bool, self, other)


def as_self(target: Tensor | None, self: Tensor, *others: Any, **_: Any) -> Tensor:
    """Contiguous, of the first input's shape and dtype; what is written to shares no memory with the other inputs."""
    if target is None:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)
    return fitting(target, self.shape, self.dtype, *others)


def fitting(target: Tensor, shape: Sequence[int], dtype: torch.dtype, *inputs: Any) -> Tensor:
    """What is written to, where it has the result's shape and dtype and shares no memory with the inputs."""
    refuse_misfit(target, shape, dtype)
    start = target.untyped_storage().data_ptr()
    if any(isinstance(each, Tensor) and each.untyped_storage().data_ptr() == start != 0 for each in inputs):
        raise NoRule("an input shares memory with the output")
    return target
