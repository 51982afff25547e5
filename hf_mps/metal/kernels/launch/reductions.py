"""Reductions to values over some dimensions or all (sum, mean, amax, any), and to places (argmax, argmin)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch import reduce
from hf_mps.metal.kernels.launch.reduce import MAX, MIN, SUM, Blocks, Family, Reduction
from hf_mps.metal.kernels.rules import by_meta, kernels, refuse, rule
from hf_mps.metal.kernels.values import DIMENSIONS, metal, u32

# Host: operations/ReduceOps.mm.


Dims = Sequence[int] | int | None


def wrapped(dims: Dims, rank: int) -> set[int]:
    """The dimensions meant, counted from 0; all of them for None or none."""
    given = [dims] if isinstance(dims, int) else dims or range(rank)
    return {each % rank for each in given} if rank else set()


def kept(output: Tensor, dims: set[int], rank: int) -> tuple[list[int], list[int]]:
    """Return sizes and strides of the output with the reduced dimensions kept."""
    if output.dim() < rank:
        for at in sorted(dims):
            output = output.unsqueeze(at)
    return list(output.shape), list(output.stride())


def reduced(family: Family, given: Tensor, output: Tensor, dim: Dims = None, *, divisor: float = 0.0) -> None:
    """Reduce what there is to reduce into the output."""
    # Only a release that reduces in segments (2.14 and later) has kernels of flat elements.
    if given.numel() and output.numel():
        work = Reduction(family, given, output, *kept(output, wrapped(dim, given.dim()), given.dim()), divisor)
        work.check()
        (reduce.run_in_segments if work.kernel_name("flat") in kernels else reduce.run_whole)(work)


@rule("sum.dim_IntList", outputs=by_meta, family=SUM)
@rule("nansum", outputs=by_meta, family=reduce.NANSUM)
def sums(output: Tensor, given: Tensor, dim: Dims = None, *_: bool, family: Family, **__: torch.dtype) -> None:
    """Elements are cast to the result's dtype before, integers to int64; nansum of integers is their sum."""
    refuse(given.is_complex() and family is reduce.NANSUM)
    if not given.numel():
        output.zero_()
        return
    floats = given.is_floating_point() and (output.is_floating_point() or output.is_complex())
    reduced(family if floats else SUM, given.to(output.dtype), output, dim)


@rule("mean.dim", outputs=by_meta)
def means(output: Tensor, given: Tensor, dim: Dims, *_: bool, **__: torch.dtype) -> None:
    """The sum's kernels, which divide their accumulator before they round it."""
    if given.numel():
        reduced(SUM, given.to(output.dtype), output, dim, divisor=given.numel() / output.numel())
    else:
        output.fill_(math.nan)


@rule("count_nonzero.dim_IntList", outputs=by_meta)
def counts(output: Tensor, given: Tensor, dim: Sequence[int]) -> None:
    """Elements that are not 0, by dimension."""
    output.zero_()
    reduced(reduce.COUNT_NONZERO, given, output, dim)


@rule("amax", outputs=by_meta, family=MAX)
@rule("amin", outputs=by_meta, family=MIN)
def extreme(output: Tensor, given: Tensor, dim: Sequence[int] = (), keepdim: bool = False, *, family: Family) -> None:
    """The largest or the smallest, NaN where there is one."""
    refuse(given.is_complex())
    reduced(family, given, output, dim)


@rule("aminmax", outputs=by_meta)
def both(outputs: tuple[Tensor, Tensor], given: Tensor, *, dim: int | None = None, keepdim: bool = False) -> None:
    """amin, then amax."""
    for output, family in zip(outputs, (MIN, MAX), strict=True):
        extreme(output, given, () if dim is None else (dim,), family=family)


# Host: ../ReduceOps.cpp.
@rule("all", "all.dim", outputs=by_meta, family=reduce.ALL)
@rule("any", "any.dim", outputs=by_meta, family=reduce.ANY)
def decided(output: Tensor, given: Tensor, dim: int | None = None, keepdim: bool = False, *, family: Family) -> None:
    """Whether no element is 0, or one is not, along a dimension or of all.

    A byte for uint8 and bool for the others, as NumPy has it; one element is copied and never reduced.
    """
    if given.numel() == 0:
        output.fill_(family is reduce.ALL)
    elif given.numel() == 1:
        output.copy_(given.view_as(output).to(torch.bool))
    else:
        reduced(family, given, output, dim)


@rule("argmax", outputs=by_meta, prefix="argmax")
@rule("argmin", outputs=by_meta, prefix="argmin")
def positions(output: Tensor, given: Tensor, dim: int | None = None, keepdim: bool = False, *, prefix: str) -> None:
    """The first position of the extreme element, or of the first NaN. Of all elements: of the contiguous tensor's."""
    refuse(given.is_complex() or given.dtype == torch.bool)
    if not given.dim():
        output.zero_()
    elif dim is None:
        _along(Places(prefix, metal(given.dtype), given.contiguous().view(-1), output), 0, ([1], [1]), whole=True)
    elif output.numel():
        dims = wrapped(dim, given.dim())
        layout = kept(output, dims, given.dim())
        _along(Places(prefix, metal(given.dtype), given, output), min(dims), layout, whole=False)


def _along(places: Places, dim: int, layout: tuple[list[int], list[int]], *, whole: bool) -> None:
    """`layout` is the output's sizes and strides, the dimension kept."""
    given, output = places.given, places.output
    rank, length = given.dim(), given.shape[dim]
    if f"{places.prefix}_reduction_combine_{places.element}" in kernels:
        if along(places, dim):
            return
    elif not whole and rank >= 2 and dim in {0, rank - 1} and given.is_contiguous() and output.is_contiguous():
        rest = given.numel() // length
        if dim:
            groups = -(-rest // (reduce.INNER // 32))
            places.launch(f"inner_{places.element}_long", (rest, length), groups, reduce.INNER)
        else:
            group = (reduce.OUTER, reduce.OUTER, 1)
            places.launch(f"outer_{places.element}_long", (length, rest, 1, 0), -(-rest // reduce.OUTER), group)
        return
    # A threadgroup for each result, whatever the strides.
    refuse(rank > DIMENSIONS, f"more than {DIMENSIONS} dimensions")
    bound: dict[str, Tensor | bytes] = {"input": given, "output": output}
    bound["params"] = reduce.parameters(0.0, length, given.shape, given.stride(), *layout)
    kernel = kernels[f"{places.prefix}_reduction_{places.element}_long"]
    kernel.launch(bound, groups=output.numel(), group=reduce.simdgroups(length))


@rule("max", outputs=by_meta, family=MAX)
@rule("min", outputs=by_meta, family=MIN)
def extreme_of_all(output: Tensor, given: Tensor, *, family: Family) -> None:
    """The largest or smallest element; MPSGraph before 2.14."""
    _need_segments(family)
    refuse(given.is_complex() or not given.numel())
    reduced(family, given, output)


@rule("max.dim", outputs=by_meta, family=MAX)
@rule("min.dim", outputs=by_meta, family=MIN)
def extremes(outputs: tuple[Tensor, Tensor], given: Tensor, dim: int, keepdim: bool = False, *, family: Family) -> None:
    """argmax or argmin, then the values; MPSGraph before 2.14."""
    output, places = outputs
    _need_segments(family)
    refuse(given.is_complex())
    if not given.dim():
        output.copy_(given)
        places.zero_()
    elif output.numel():
        # argmax has no kernel for bool, whose bytes are in the same order.
        source = given.view(torch.int8) if given.dtype == torch.bool else given
        positions(places, source, dim, prefix=f"arg{family.prefix}")
        reduced(family, given, output, dim)


def _need_segments(family: Family) -> None:
    """Raise NoRule where the release has these on MPSGraph: before reductions in segments."""
    kernels.need(f"{family.prefix}_reduction_flat_float_float")


MANY_GROUPS, SEGMENT, PARTIALS = 512, 512, 16384
"""Threadgroups that fill the GPU, the least of a segment, and the partial results to aim for (ARG_SPLIT_…)."""


@dataclass(frozen=True)
class Places:
    """Places of extremes to find: kernels' prefix ("argmax") and element, the tensor, and where they go."""

    prefix: str
    element: str
    given: Tensor
    output: Tensor

    def launch(self, kernel: str, sizes: tuple[int, ...], groups: Any, group: Any, **bound: Tensor | bytes) -> None:
        """Launch a kernel of this operator; a binding that the pass does not use is left out, as the host does."""
        found = kernels[f"{self.prefix}_reduction_{kernel}"]
        bound = {"input": self.given, "output": self.output, "sizes": u32(sizes), **bound}
        found.launch({each.name: bound.get(each.name) for each in found.signature.bindings}, groups=groups, group=group)


def along(places: Places, dim: int) -> bool:
    """Reduce `dim` of a tensor of a rank of one at least; False where it is for the general kernel."""
    source = places.given
    length, last = source.shape[dim], source.dim() - 1
    if length == 1:
        places.output.zero_()
        return True
    if not places.output.is_contiguous():
        return False
    if not source.is_contiguous():
        for to in (last, 0):
            if (moved := places.given.movedim(dim, to)).is_contiguous():
                source, dim = moved, to
                break
    if dim < last:
        blocks = reduce.blocks_of(source.shape, source.stride(), dim, dense=source.is_contiguous())
        if blocks is None:
            return False
        _outer(replace(places, given=source), blocks)
        return True
    if source.is_contiguous():
        _inner(replace(places, given=source), length)
    return source.is_contiguous()


def _outer(places: Places, blocks: Blocks) -> None:
    if not blocks.tall:
        _columns(places, blocks, f"outer_{places.element}_long", 1, blocks.outer)
    elif blocks.inner < reduce.OUTER and places.given.is_contiguous():
        segments = min(max(blocks.dim * blocks.inner // reduce.NARROW_ELEMENTS, 2), reduce.MOST_SEGMENTS)
        found = _partial(places, blocks.inner, segments)
        sizes, active = (blocks.dim, blocks.inner, segments, 0), reduce.NARROW // blocks.inner * blocks.inner
        places.launch(f"narrow_p1_{places.element}", sizes, (1, segments, 1), active, **found)
        _combine(places, **found)
    else:
        segments = min(max(reduce.TALL_STRIDED // blocks.groups, 2), min(blocks.dim, reduce.MOST_SEGMENTS))
        found = _partial(places, blocks.inner, segments)
        _columns(places, blocks, f"outer_p1_{places.element}", segments, 1, **found)
        _combine(places, **found)


def _columns(places: Places, blocks: Blocks, kernel: str, segments: int, outer: int, **found: Tensor) -> None:
    grid = (math.ceil(blocks.inner / reduce.OUTER), segments, outer)
    sizes = (blocks.dim, blocks.inner, segments, 0)
    places.launch(kernel, sizes, grid, (reduce.OUTER, reduce.OUTER, 1), strides=blocks.strides, **found)


def _inner(places: Places, length: int) -> None:
    rows = places.given.numel() // length
    groups = math.ceil(rows / (reduce.INNER // 32))
    if groups >= MANY_GROUPS or length < reduce.SPLIT_ROW:
        places.launch(f"inner_{places.element}_long", (rows, length, 0, 0), groups, reduce.INNER)
        return
    most = min(length // SEGMENT, max(2, PARTIALS // max(rows, 1)))
    each = math.ceil(length / max(most, 2))
    segments = math.ceil(length / each)
    found, groups = _partial(places, rows, segments), math.ceil(rows * segments / (reduce.INNER // 32))
    sizes = (rows * segments, each, segments, length)
    places.launch(f"inner_p1_{places.element}", sizes, groups, reduce.INNER, **found)
    _combine(places, **found)


def _partial(places: Places, results: int, segments: int) -> dict[str, Tensor]:
    """Return room for a value and a place for each segment of each result."""
    shape = (results, segments)
    return {"val_out": places.given.new_empty(shape), "idx_out": places.given.new_empty(shape, dtype=torch.int32)}


def _combine(places: Places, val_out: Tensor, idx_out: Tensor) -> None:
    """The best of each result's segments."""
    results, segments = val_out.shape
    groups = math.ceil(results / (reduce.INNER // 32))
    sizes = (results, segments, 0, 0)
    places.launch(f"combine_{places.element}", sizes, groups, reduce.INNER, input=val_out, idx_in=idx_out)
