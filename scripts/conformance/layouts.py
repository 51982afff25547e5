"""The same call in another layout of memory, another size or another dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from scripts.conformance.calls import Call, on, run, written

LARGE = 40_000
"""Elements of a large case's largest tensor, at the least: many threadgroups, and more than one core's share."""
LARGEST = 1_000_000


def transposed(tensor: Tensor) -> Tensor:
    """Dimensions in memory the other way round."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def strided(tensor: Tensor) -> Tensor:
    """Each second element of a larger memory, along the last dimension."""
    if tensor.dim() == 0:
        return tensor
    whole = torch.full((*tensor.shape, 2), 77, dtype=torch.int8).to(tensor.dtype)
    whole[..., 0] = tensor
    return whole[..., 0]


def offset(tensor: Tensor) -> Tensor:
    """Three elements behind the beginning of its memory, and three before its end."""
    whole = torch.full((tensor.numel() + 6,), 77, dtype=torch.int8).to(tensor.dtype)
    inner = whole[3:-3].view(tensor.shape)
    inner.copy_(tensor)
    return inner


def broadcast(tensor: Tensor) -> Tensor:
    """The first row repeated without memory of its own: stride 0."""
    return tensor[:1].expand_as(tensor) if tensor.dim() and tensor.shape[0] > 1 else tensor


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda tensor: tensor,
    "transposed": transposed,
    "strided": strided,
    "offset": offset,
    "broadcast": broadcast,
}


def laid_out(call: Call, layout: str) -> Call | None:
    """The call in a layout; None where no tensor changes by it. What is written is never broadcast."""
    changed = call.with_tensors(LAYOUTS[layout])
    if layout == "broadcast":
        changed = _with_written_of(changed, call)
    if layout != "dense" and all(_same(*pair) for pair in zip(call.tensors, changed.tensors, strict=True)):
        return None
    return changed


def dense(call: Call) -> Call:
    """The call with each tensor in memory of its own, in order and without gaps."""
    return call.with_tensors(lambda tensor: tensor.detach().clone(memory_format=torch.contiguous_format))


def _same(one: Tensor, other: Tensor) -> bool:
    return (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())


def _with_written_of(call: Call, original: Call) -> Call:
    arguments, options = list(call.arguments), dict(call.options)
    for place, name in written(call.operator):
        if place is not None and place < len(arguments):
            arguments[place] = original.arguments[place]
        elif name in options:
            options[name] = original.options[name]
    return call._replace(arguments=tuple(arguments), options=options)


def sized(call: Call, size: str, compute: Callable[[Call], Sequence[Tensor | None]] = run) -> Call | None:
    """The call with "one" element, an "empty" first dimension, or "large"; None where it has no tensor to change.

    Equal dimensions stay equal, and a list of integers that is a shape changes with them, so that most calls stay
    valid: what PyTorch refuses is no case. `compute` gives the results of a call, whose number of elements is limited.
    """
    lengths = sorted({length for tensor in call.tensors for length in tensor.shape if length > 1})
    if not lengths or all(tensor.dim() == 0 for tensor in call.tensors):
        return None
    if size == "one":
        new = dict.fromkeys(lengths, 1)
    elif size == "empty":
        first = next((tensor.shape[0] for tensor in call.tensors if tensor.dim()), 0)
        new = {first: 0} if first > 1 else {}
    else:
        new = _stretched(call, lengths)
    changed = _with_lengths(call, new) if new else None
    if changed is not None and size != "large":
        changed = _inside(changed)
    return changed if changed is not None and _moderate(changed, compute) else None


def _inside(call: Call) -> Call | None:
    """A smaller call whose integers, which are places in the other tensors, are still inside; None where none can be.

    PyTorch's CPU kernels do not check all of them.
    """
    kinds = {_kind(each.dtype) for each in call.tensors if each.numel()}
    if not any(each.is_floating_point() for each in call.tensors) or "integer" not in kinds:
        return call
    if any(each.numel() == 0 for each in call.tensors):
        return None
    return call.with_tensors(lambda each: torch.zeros_like(each) if _kind(each.dtype) == "integer" else each)


def _moderate(call: Call, compute: Callable[[Call], Sequence[Tensor | None]]) -> bool:
    """Whether the results have at most LARGEST elements: PyTorch's Meta kernels compute shapes without memory."""
    try:
        results = compute(on(call, "meta"))
    except Exception:
        return sum(each.numel() for each in call.tensors) <= LARGE * 4
    return sum(each.numel() for each in results if each is not None) <= LARGEST


def _stretched(call: Call, lengths: list[int]) -> dict[int, int]:
    largest = max(call.tensors, key=Tensor.numel)
    if largest.numel() == 0 or largest.numel() >= LARGE:
        return {}
    dimensions = sum(length > 1 for length in largest.shape) or 1
    factor = math.ceil((LARGE / largest.numel()) ** (1 / dimensions))
    return {length: factor * length + 3 for length in lengths}


def _with_lengths(call: Call, new: dict[int, int]) -> Call | None:
    shapes = {tuple(tensor.shape) for tensor in call.tensors}
    suffixes = {shape[place:] for shape in shapes for place in range(len(shape))}
    wanted = [math.prod(new.get(length, length) for length in tensor.shape) for tensor in call.tensors]
    if max(wanted) > LARGEST or any(set(each) & new.keys() for each in _lists(call) if tuple(each) not in suffixes):
        return None  # a list of numbers that only the operator knows how to change

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            return resized(value, [new.get(length, length) for length in value.shape])
        return value

    def numbers(value: Any) -> Any:
        if isinstance(value, list | tuple) and value and all(type(each) is int for each in value):
            return [new.get(each, each) for each in value] if tuple(value) in suffixes else value
        return tree_map(leaf, value)

    return call._replace(
        arguments=tuple(numbers(value) for value in call.arguments),
        options={name: numbers(value) for name, value in call.options.items()},
    )


def _lists(call: Call) -> list[list[int]]:
    given = [*call.arguments, *call.options.values()]
    lists = [each for each in given if isinstance(each, list | tuple)]
    return [list(each) for each in lists if each and all(type(number) is int for number in each)]


def resized(tensor: Tensor, shape: list[int]) -> Tensor:
    """A tensor of another shape whose values are drawn as the given one's are spread; sorted integers stay sorted."""
    generator = torch.Generator().manual_seed(len(shape))
    count = math.prod(shape)
    if tensor.numel() == 0:
        return tensor.new_zeros(shape)
    flat = tensor.reshape(-1)
    if not tensor.dtype.is_floating_point or tensor.numel() == 1:
        drawn = flat[torch.randint(len(flat), (count,), generator=generator)]
        if _kind(tensor.dtype) == "integer" and tensor.dim() == 1 and bool((flat.diff() >= 0).all()):
            drawn = drawn.sort().values  # the beginnings of bags or rows
            drawn[:1] = flat[:1]
        return drawn.reshape(shape)
    low, high = flat.nan_to_num(0, 0, 0).aminmax()
    return (torch.rand(count, generator=generator) * (high - low) + low).to(tensor.dtype).reshape(shape)


def cast(call: Call, dtype: torch.dtype, *, first_alone: bool = False) -> Call:
    """The call with its tensors of the kind of `dtype` (floating, integer) in that dtype.

    `first_alone` leaves the dtype of all but the first argument as it is: a scale stays float32 beside half gradients.
    """
    kind = _kind(dtype)

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor) and _kind(value.dtype) == kind:
            return value.to(dtype)
        return dtype if isinstance(value, torch.dtype) and not first_alone and _kind(value) == kind else value

    arguments = tree_map(leaf, call.arguments[:1] if first_alone else call.arguments)
    rest = call.arguments[1:] if first_alone else ()
    options = call.options if first_alone else tree_map(leaf, call.options)
    return call._replace(arguments=(*arguments, *rest), options=options)


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "floating"
    return "bool" if dtype == torch.bool else "integer"
