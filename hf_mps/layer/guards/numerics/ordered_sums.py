"""The operators that add rows at repeated indices, each with its sums in one order (`add_rows`).

Each returns None where it is not meant: integers, whose sums are exact in any order, and what the operator refuses
(indices out of range, shapes that do not fit), to which the device has its own answer.

The order is decided on the CPU, from the keys alone. The device then adds rows in pairs, their sums in pairs, and so
on: as many additions in all as there are rows, in as many steps as the largest sum needs to be halved. No two threads
add to the same place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch


def embedding_dense_backward(grad: Any, indices: Any, num_weights: int, padding_idx: int, by_frequency: bool) -> Any:
    """Return the gradient of an embedding's weights, (num_weights, width)."""
    keys = indices.reshape(-1).cpu().long()
    if not _within(keys, num_weights):
        return None
    terms = grad.reshape(keys.numel(), grad.shape[-1])
    if by_frequency:
        often = torch.bincount(keys, minlength=num_weights)[keys]
        terms = terms / often.to(grad.device)[:, None]
    kept = (keys != padding_idx).nonzero().view(-1)
    if kept.numel() < keys.numel():
        keys, terms = keys[kept], terms.index_select(0, kept.to(grad.device))
    weights = grad.new_zeros(num_weights, grad.shape[-1])
    add_rows(weights, keys, terms, anew=True)
    return weights


def index_put(target: Any, indices: Any, values: Any, accumulate: bool = False, unsafe: bool = False) -> Any:
    """`target[indices] += values` with every repetition counted, in place."""
    if not accumulate or not target.is_floating_point() or values.dtype != target.dtype:
        return None
    split = [part for index in indices for part in _as_numbers(index)]
    dims = [dim for dim, index in enumerate(split) if index is not None]
    shape = _common(*(split[dim].shape for dim in dims))
    if not dims or len(split) > target.dim() or shape is None:
        return None
    rest = [dim for dim in range(target.dim()) if dim not in dims]
    keys = torch.zeros(math.prod(shape), dtype=torch.int64)
    for dim in dims:
        size, flat = target.shape[dim], split[dim].expand(shape).reshape(-1)
        flat = torch.where(flat < 0, flat + size, flat)
        if not _within(flat, size):
            return None
        keys = keys * size + flat
    # Where the indexed dimensions lie side by side their results stay there, otherwise they come first.
    side_by_side = dims == list(range(dims[0], dims[-1] + 1))
    first, sizes = dims[0] if side_by_side else 0, [target.shape[dim] for dim in rest]
    filled = (*sizes[:first], *shape, *sizes[first:])
    if _common(values.shape, filled) != filled:
        return None
    places = range(first, first + len(shape))
    terms = values.expand(filled).movedim(tuple(places), tuple(range(len(shape))))
    width = math.prod(sizes)
    return _into(target, target.permute(*dims, *rest), width, keys, terms.reshape(keys.numel(), width))


def index_add_(given: Any, dim: int, index: Any, source: Any, *, alpha: Any = 1) -> Any:
    """As Tensor.index_add_."""
    if not _alike(given, source) or index.dim() > 1:
        return None
    keys, across, terms = index.reshape(-1).cpu().long(), given.movedim(dim, 0), source.movedim(dim, 0)
    if terms.shape != (keys.numel(), *across.shape[1:]) or not _within(keys, across.shape[0]):
        return None
    width = math.prod(across.shape[1:])
    terms = terms.reshape(keys.numel(), width)
    return _into(given, across, width, keys, terms if alpha == 1 else terms * alpha)


def scatter_add_(target: Any, dim: int, index: Any, source: Any, *, anew: bool = False) -> Any:
    """As Tensor.scatter_add_; every element goes its own way, so that a row is one element."""
    if not _alike(target, source) or index.dim() != target.dim():
        return None
    at_hand, dim = index.cpu().long(), dim % target.dim()
    fits = all(
        size <= of_source and (place == dim or size <= of_given)
        for place, (size, of_source, of_given) in enumerate(zip(index.shape, source.shape, target.shape, strict=True))
    )
    if not fits or not _within(at_hand, target.shape[dim]):
        return None
    keys = torch.zeros((), dtype=torch.int64)
    for place, size in enumerate(target.shape):
        along = torch.arange(at_hand.shape[place]).view(*(-1 if each == place else 1 for each in range(target.dim())))
        keys = keys * size + (at_hand if place == dim else along)
    terms = source[tuple(slice(size) for size in index.shape)].reshape(-1, 1)
    return _into(target, target, 1, keys.reshape(-1), terms, anew=anew)


def scatter_reduce_(given: Any, dim: int, index: Any, src: Any, reduce: str, *, include_self: bool = True) -> Any:
    """As Tensor.scatter_reduce_ with "sum"; other reductions are not meant."""
    return scatter_add_(given, dim, index, src, anew=not include_self) if reduce == "sum" else None


def _alike(given: Any, source: Any) -> bool:
    return bool(given.is_floating_point() and given.dtype == source.dtype and 0 < given.dim() == source.dim())


def _common(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the shape to which all of them extend, or None."""
    common: Any = torch.broadcast_shapes
    try:
        return tuple(common(*shapes))
    except RuntimeError:
        return None


def _within(index: Any, size: int) -> bool:
    if index.numel() == 0:
        return True
    low, high = index.aminmax()
    return bool(low >= 0 and high < size)


def _as_numbers(index: Any) -> tuple[Any, ...]:
    """Return an index for each dimension that it stands for, on the CPU: a mask stands for several."""
    if index is None:
        return (None,)
    at_hand = index.cpu()
    return at_hand.nonzero(as_tuple=True) if at_hand.dtype in (torch.bool, torch.uint8) else (at_hand.long(),)


def _into(given: Any, view: Any, width: int, keys: Any, terms: Any, *, anew: bool = False) -> Any:
    """Add rows to `given`, seen as rows by way of its `view`; returns `given`."""
    rows = view.contiguous()
    add_rows(rows.view(-1, max(width, 1)) if width else rows.view(0, 0), keys, terms, anew=anew)
    if rows.data_ptr() != given.data_ptr() or not view.is_contiguous():
        view.copy_(rows)
    return given


def _anew(run: Callable[..., Any], given: Any, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """As the operator without the underscore, or with `out=`."""
    found = run(given.clone(), *args, **kwargs)
    return found if found is None or out is None else out.resize_(found.shape).copy_(found)


ORDERED: dict[str, Callable[..., Any]] = {
    "embedding_dense_backward": embedding_dense_backward,
    "_index_put_impl_": index_put,
    "index_add_": index_add_,
    "scatter_add_": scatter_add_,
    "scatter_reduce_.two": scatter_reduce_,
    **dict.fromkeys(("index_add", "index_add.out"), partial(_anew, index_add_)),
    **dict.fromkeys(("scatter_add", "scatter_add.out"), partial(_anew, scatter_add_)),
    **dict.fromkeys(("scatter_reduce.two", "scatter_reduce.two_out"), partial(_anew, scatter_reduce_)),
}
"""Operator -> what takes its place under the flag."""


def add_rows(target: Any, keys: Any, terms: Any, *, anew: bool = False) -> None:
    """Add row i of `terms` to row `keys[i]` of `target`, in place; `anew`: in place of what was there.

    `target` is (rows, width) and contiguous, `terms` (n, width), both on one device and floating point; `keys` (n,)
    int64 on the CPU, each a row of `target`. Half precision is added up in float32. Waits once, to move its order.
    """
    if keys.numel() == 0 or terms.shape[1] == 0:
        return
    half = terms.dtype in (torch.float16, torch.bfloat16)
    order = keys.argsort(stable=True)
    rows, counts = torch.unique_consecutive(keys[order], return_counts=True)
    levels = _levels(counts, order)
    parts = [rows, *(part for level in levels for part in level)] if levels else [rows, order]
    together: Any = torch.cat(parts).to(target.device)
    target_rows, *moved = together.split([part.numel() for part in parts])
    sums = terms.float() if half else terms
    if not levels:
        sums = sums.index_select(0, moved.pop())
    for left, right in zip(moved[::2], moved[1::2], strict=True):
        sums = torch.cat([sums, sums.new_zeros(1, sums.shape[1])])
        sums = sums.index_select(0, left) + sums.index_select(0, right)
    if not anew:
        sums = sums + target.index_select(0, target_rows)
    # Each row is written once: nothing races.
    target.scatter_(0, target_rows[:, None].expand_as(sums), sums.to(target.dtype))


def _levels(counts: Any, order: Any) -> list[tuple[Any, Any]]:
    """For each halving the rows that are added to one another, as (left, right); the row past the last is zero.

    `counts` says how many rows each sum has, `order` where they lie before the first halving.
    """
    levels: list[tuple[Any, Any]] = []
    while int(counts.max()) > 1:
        total = int(counts.sum())
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        place = torch.arange(total) - first
        left = torch.nonzero(place % 2 == 0).view(-1)
        alone = place[left] + 1 == torch.repeat_interleave(counts, counts)[left]
        right = torch.where(alone, total, left + 1)
        if not levels:
            order = torch.cat([order, torch.tensor([total])])
            left, right = order[left], order[right]
        levels.append((left, right))
        counts = (counts + 1) // 2
    return levels
