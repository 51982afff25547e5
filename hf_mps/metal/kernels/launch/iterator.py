"""How a pointwise operator walks over its operands, and how its result lies: PyTorch's TensorIterator.

Shapes broadcast; dimensions are put in the order of their strides, fastest first, and merged where every operand runs
through them in one stride. What is left is one dimension without gaps (a dense kernel), or sizes with a stride in
bytes for each operand (a strided one). Facts: aten/src/ATen/TensorIterator.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import refuse
from hf_mps.metal.kernels.values import NoRule

LARGEST_GROUP = 1024

LARGEST_OFFSET = (1 << 31) - 1
"""Bytes from a tensor's start beyond which the host cuts a launch into several."""

Lying = tuple[tuple[int, ...], tuple[int, ...], int]
"""A tensor's shape, strides in elements, and bytes of an element."""


class Walk(NamedTuple):
    """The way through the operands of one launch."""

    shape: tuple[int, ...]
    """Elements along each dimension that is left, the fastest first."""
    strides: tuple[tuple[int, ...], ...]
    """Bytes from one element to the next along each of them, for each operand."""
    contiguous: bool
    """Every operand is without gaps in the same order."""


def walk(output: Tensor, *inputs: Tensor) -> Walk:
    """Return the way through an output and its inputs, which broadcast to it.

    Raises:
        NoRule: an operand spans 2 GiB or more, which the host cuts into several launches.
    """
    return _walk(tuple((tuple(each.shape), each.stride(), each.element_size()) for each in (output, *inputs)))


MANY = 1 << 27
"""Elements that may span 2 GiB, so that `walk` has to look."""


def plane(across: int, down: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return a grid of two dimensions, and its threadgroup of as many threads as it may have (mtl_dispatch2DJob)."""
    width = max(1, min(across, LARGEST_GROUP))
    return (across, down, 1), (width, max(1, min(down, LARGEST_GROUP // width)), 1)


def all_dense(output: Tensor, *inputs: Tensor) -> bool:
    """Every operand is contiguous and has the output's shape: the quick test for the common case."""
    shape = output.shape
    if not output.is_contiguous() or output.numel() >= MANY:
        return False
    return all(each.shape == shape and each.is_contiguous() for each in inputs)


@lru_cache(maxsize=4096)
def _walk(operands: tuple[Lying, ...]) -> Walk:
    shape = operands[0][0]
    rank = len(shape)
    order, strides = _ordered(shape, operands)
    sizes = [shape[dim] for dim in order]
    steps = [[each[dim] for dim in order] for each in strides]
    for size_steps in steps:
        reach = sum((size - 1) * step for size, step in zip(sizes, size_steps, strict=True))
        refuse(reach >= LARGEST_OFFSET, "an operand of 2 GiB or more, which the host launches in parts")
    if all(each[0] == shape for each in operands) and all(is_dense(*each[:2]) for each in operands):
        return Walk((math.prod(shape),), tuple((each[2],) for each in operands), contiguous=True)
    # In place: `sizes` and `steps` have the merged dimensions first, and what is behind them means nothing.
    kept = _merge(sizes, steps) if rank > 1 else rank
    walk = Walk(tuple(sizes[:kept]), tuple(tuple(each[:kept]) for each in steps), contiguous=False)
    dense = kept == 0 or (kept == 1 and all(each[0] == op[2] for each, op in zip(steps, operands, strict=True)))
    return walk._replace(contiguous=dense or all(size == 1 for size in shape))


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether elements are side by side in order, the strides of dimensions of length 1 left aside."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _ordered(shape: tuple[int, ...], operands: Sequence[Lying]) -> tuple[list[int], list[list[int]]]:
    """Return the dimensions, fastest first, and each operand's strides in bytes over the broadcast shape."""
    rank = len(shape)
    strides = [_broadcast_strides(shape, *each) for each in operands]
    order = list(range(rank - 1, -1, -1))
    for at in range(1, rank):
        mine = at
        for other in range(at - 1, -1, -1):
            before = _compare(shape, strides, order[other], order[mine])
            if before > 0:
                order[other], order[mine] = order[mine], order[other]
                mine = other
            elif before < 0:
                break
    return order, strides


def _broadcast_strides(shape: tuple[int, ...], mine: tuple[int, ...], strides: tuple[int, ...], size: int) -> list[int]:
    missing = len(shape) - len(mine)
    own = zip(shape[missing:], mine, strides, strict=True)
    return [0] * missing + [0 if each == 1 and whole != 1 else stride * size for whole, each, stride in own]


def _compare(shape: tuple[int, ...], strides: list[list[int]], first: int, second: int) -> int:
    """1 where `first` should come after `second`, -1 where before, 0 where no operand tells."""
    for each in strides:
        one, two = each[first], each[second]
        # An operand that repeats along one of them says nothing of their order (should_swap in reorder_dimensions).
        if one == 0 or two == 0:
            continue
        if one != two:
            return 1 if one > two else -1
        # Of equal strides the shorter dimension is the faster one.
        if shape[first] > shape[second]:
            return 1
    return 0


def _merge(sizes: list[int], steps: list[list[int]]) -> int:
    """Merge neighbouring dimensions in place; the number that is left."""
    last = 0
    for dim in range(1, len(sizes)):
        size = sizes[dim]
        if 1 not in (sizes[last], size) and any(sizes[last] * each[last] != each[dim] for each in steps):
            last += 1
            sizes[last] = 1  # as one that is still to take the next dimension's strides
        if sizes[last] == 1:
            for each in steps:
                each[last] = each[dim]
        sizes[last] *= size
    return last + 1


def result(dtype: torch.dtype, *inputs: Tensor) -> Tensor:
    """Return a new output for inputs, with the shape and strides that TensorIterator gives it, on the device.

    Raises:
        NoRule: the shapes do not broadcast, or no input is on the device.
    """
    first = inputs[0] if inputs[0].is_mps else next((each for each in inputs if each.is_mps), inputs[0])
    shape, strides = first.shape, first.stride()
    if all(each.shape == shape and each.stride() == strides for each in inputs):
        return torch.empty_like(first, dtype=dtype)
    lying = _result(tuple((tuple(each.shape), each.stride()) for each in inputs))
    return torch.empty_strided(*lying, dtype=dtype, device=first.device)


@lru_cache(maxsize=4096)
def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that all of them broadcast to. Raises NoRule where there is none."""
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise NoRule("PyTorch refuses the arguments: their shapes do not broadcast") from None


Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""A tensor's shape and strides."""


@lru_cache(maxsize=4096)
def _result(inputs: tuple[Layout, ...]) -> Layout:
    shape = broadcast(*(each for each, _ in inputs))
    order = list(range(len(shape) - 1, -1, -1))
    if not (all(each == shape for each, _ in inputs) and all(is_dense(*each) for each in inputs)):
        order, _ = _ordered(shape, [(*each, 1) for each in inputs])
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        # As PyTorch lays out tensors without elements, whose strides are not 0.
        step *= max(1, shape[dim])
    return shape, tuple(strides)
