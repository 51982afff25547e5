"""Reductions to values over some dimensions or all (sum, mean, amax, any), and to places (argmax, argmin)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch import reduce
from hf_mps.metal.kernels.launch.reduce import MAX, MIN, SUM, Blocks, Family, Reduction
from hf_mps.metal.kernels.rules import kernels, refuse, refuse_misfit, rule
from hf_mps.metal.kernels.values import metal, u32

# Host: operations/ReduceOps.mm.


def wrapped(dims: Sequence[int] | int | None, rank: int) -> set[int]:
    """The dimensions meant, counted from 0; all of them for None or none. Raises NoRule where PyTorch refuses."""
    if dims is None:
        return set(range(rank))
    given = [dims] if isinstance(dims, int) else dims
    if not given:
        return set(range(rank))
    limit = max(rank, 1)
    found = {each % limit for each in given}
    refuse(len(found) != len(given) or any(not -limit <= each < limit for each in given))
    return found if rank else set()


def result(given: Tensor, dims: set[int], keepdim: bool, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return a new tensor for the result, or `out` where it has that shape and dtype."""
    if keepdim:
        shape = [1 if at in dims else size for at, size in enumerate(given.shape)]
    else:
        shape = [size for at, size in enumerate(given.shape) if at not in dims]
    if out is None:
        return given.new_empty(shape, dtype=dtype)
    refuse_misfit(out, shape, dtype)
    return out


def kept(output: Tensor, dims: set[int], rank: int) -> tuple[list[int], list[int]]:
    """Return sizes and strides of the output with the reduced dimensions kept."""
    if output.dim() == rank:
        return list(output.shape), list(output.stride())
    sizes, strides = [], []
    rest = iter(zip(output.shape, output.stride(), strict=True))
    for at in range(rank):
        size, stride = (1, 0) if at in dims else next(rest)
        sizes.append(size)
        strides.append(stride)
    return sizes, strides


def reduced(family: Family, given: Tensor, output: Tensor, dims: set[int], *, divisor: float = 0.0) -> Tensor:
    """`output`, with what there is to reduce reduced into it."""
    if given.numel() and output.numel():
        sizes, strides = kept(output, dims, given.dim())
        work = Reduction(family, given, output, sizes, strides, divisor)
        work.check()
        in_segments = work.kernel_name("flat") in kernels
        (reduce.run_in_segments if in_segments else reduce.run_whole)(work)
    return output


@rule("sum.dim_IntList", "sum.IntList_out", family=SUM)
@rule("nansum", "nansum.out", family=reduce.NANSUM)
def sums(
    given: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    family: Family,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Elements are cast to the result's dtype before, integers to int64; nansum of integers is their sum."""
    refuse(given.is_complex() and family is reduce.NANSUM)
    dims = wrapped(dim, given.dim())
    wanted = dtype or (out.dtype if out is not None else None)
    if wanted is None:
        wanted = given.dtype if given.dtype.is_floating_point or given.dtype.is_complex else torch.int64
    output = result(given, dims, keepdim, wanted, out)
    family = family if given.is_floating_point() and (wanted.is_floating_point or wanted.is_complex) else SUM
    _need(SUM)
    if not given.numel():
        return output.zero_()
    return reduced(family, given if given.dtype == wanted else given.to(wanted), output, dims)


@rule("mean.dim", "mean.out")
def means(
    given: Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The sum's kernels, which divide their accumulator before they round it."""
    dims = wrapped(dim, given.dim())
    wanted = dtype or (out.dtype if out is not None and given.dtype == out.dtype else given.dtype)
    refuse(not (wanted.is_floating_point or wanted.is_complex))
    output = result(given, dims, keepdim, wanted, out)
    _need(SUM)
    if not given.numel():
        return output.fill_(math.nan)
    divisor = given.numel() / output.numel()
    return reduced(SUM, given if given.dtype == wanted else given.to(wanted), output, dims, divisor=divisor)


@rule("count_nonzero.dim_IntList")
def counts(given: Tensor, dim: Sequence[int]) -> Tensor:
    """Elements that are not 0, by dimension."""
    dims = wrapped(dim, given.dim())
    output = result(given, dims, False, torch.int64, None)
    _need(reduce.COUNT_NONZERO)
    return reduced(reduce.COUNT_NONZERO, given, output, dims) if given.numel() else output.zero_()


@rule("amax", "amax.out", family=MAX)
@rule("amin", "amin.out", family=MIN)
def extreme(
    given: Tensor, dim: Sequence[int] = (), keepdim: bool = False, *, family: Family, out: Tensor | None = None
) -> Tensor:
    """The largest or the smallest, NaN where there is one."""
    dims = wrapped(dim, given.dim())
    refuse(given.is_complex() or any(given.shape[at] == 0 for at in dims))
    _need(family)
    return reduced(family, given, result(given, dims, keepdim, given.dtype, out), dims)


@rule("aminmax")
def both(given: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """amin, then amax."""
    dims = () if dim is None else (dim,)
    refuse(dim is None and keepdim, "aminmax over all dimensions that keeps them")
    smallest: Tensor = extreme(given, dims, keepdim, family=MIN)
    largest: Tensor = extreme(given, dims, keepdim, family=MAX)
    return smallest, largest


# Host: ../ReduceOps.cpp.
@rule("all", "all.all_out", "all.dim", "all.out", family=reduce.ALL)
@rule("any", "any.all_out", "any.dim", "any.out", family=reduce.ANY)
def decided(
    given: Tensor, dim: int | None = None, keepdim: bool = False, *, family: Family, out: Tensor | None = None
) -> Tensor:
    """Whether no element is 0, or one is not, along a dimension or of all.

    A byte for uint8 and bool for the others, as NumPy has it; one element is copied and never reduced.
    """
    dims = wrapped(dim, given.dim())
    output = result(given, dims, keepdim, torch.uint8 if given.dtype == torch.uint8 else torch.bool, out)
    _need(family)
    if given.numel() == 0:
        return output.fill_(family is reduce.ALL)
    if given.numel() == 1:
        return output.copy_(given.view_as(output).to(torch.bool))
    return reduced(family, given, output, dims)


def _need(family: Family) -> None:
    """Raise NoRule where the release reduces with MPSGraph."""
    kind = "float_uchar" if family.predicate else "float_long" if family is reduce.COUNT_NONZERO else "float_float"
    kernels.need(f"{family.prefix}_reduction_{kind}")


@rule("argmax", "argmax.out", prefix="argmax")
@rule("argmin", "argmin.out", prefix="argmin")
def positions(
    given: Tensor, dim: int | None = None, keepdim: bool = False, *, prefix: str, out: Tensor | None = None
) -> Tensor:
    """The first position of the extreme element, or of the first NaN. Of all elements: of the contiguous tensor's."""
    kernels.need(f"{prefix}_reduction_float_long")
    dims = wrapped(dim, given.dim())
    refuse(given.is_complex() or given.dtype == torch.bool or any(given.shape[at] == 0 for at in dims))
    output = result(given, dims, keepdim, torch.int64, out)
    if not output.numel():
        return output
    if not given.dim():
        return output.fill_(0)
    name = metal(given.dtype)
    if dim is None:
        _along(prefix, name, given.contiguous().view(-1), 0, output, ([1], [1]), whole=True)
    else:
        _along(prefix, name, given, min(dims), output, kept(output, dims, given.dim()), whole=False)
    return output


def _along(
    prefix: str, name: str, given: Tensor, dim: int, output: Tensor, layout: tuple[list[int], list[int]], *, whole: bool
) -> None:
    if f"{prefix}_reduction_combine_{name}" in kernels:
        if not along(Places(prefix, name, given, output), dim):
            general(f"{prefix}_reduction_{name}_long", given, given.shape[dim], output, layout)
        return
    rank, length = given.dim(), given.shape[dim]
    if not whole and rank >= 2 and dim in {0, rank - 1} and given.is_contiguous() and output.is_contiguous():
        rest, places = given.numel() // length, Places(prefix, name, given, output)
        if dim == 0:
            places.launch(
                f"outer_{name}_long", (length, rest, 1, 0), -(-rest // reduce.OUTER), (reduce.OUTER, reduce.OUTER, 1)
            )
        else:
            places.launch(f"inner_{name}_long", (rest, length), -(-rest // (reduce.INNER // 32)), reduce.INNER)
        return
    general(f"{prefix}_reduction_{name}_long", given, length, output, layout)


def general(kernel: str, given: Tensor, length: int, output: Tensor, layout: tuple[list[int], list[int]]) -> None:
    """A threadgroup for each result, whatever the strides. `layout` is the output's, the dimension kept."""
    refuse(given.dim() > reduce.DIMENSIONS, f"more than {reduce.DIMENSIONS} dimensions")
    params = reduce.parameters(0.0, length, given.shape, given.stride(), *layout)
    bound = {"input": given, "output": output, "params": params}
    kernels[kernel].launch(bound, groups=output.numel(), group=reduce.simdgroups(length))


@rule("max", family=MAX)
@rule("min", family=MIN)
def extreme_of_all(given: Tensor, *, family: Family) -> Tensor:
    """The largest or smallest element; MPSGraph before 2.14."""
    _need_segments(family)
    refuse(given.is_complex() or not given.numel())
    return reduced(family, given, given.new_empty(()), set(range(given.dim())))


@rule("max.dim", "max.dim_max", family=MAX)
@rule("min.dim", "min.dim_min", family=MIN)
def extremes(given: Tensor, dim: int, keepdim: bool = False, *, family: Family, **out: Tensor) -> tuple[Tensor, Tensor]:
    """argmax or argmin, then the values; MPSGraph before 2.14."""
    values = out.pop(family.prefix, None)
    indices = next(iter(out.values()), None)
    _need_segments(family)
    dims = wrapped(dim, given.dim())
    refuse(given.is_complex() or any(given.shape[at] == 0 for at in dims))
    places = result(given, dims, keepdim, torch.int64, indices)
    output = result(given, dims, keepdim, given.dtype, values)
    if not given.dim():
        output.copy_(given)
        places.zero_()
    elif output.numel():
        # argmax has no kernel for bool, whose bytes are in the same order.
        source = given.view(torch.int8) if given.dtype == torch.bool else given
        positions(source, dim, keepdim, prefix=f"arg{family.prefix}", out=places)
        reduced(family, given, output, dims)
    return output, places


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
    given = places.given
    length, last = given.shape[dim], given.dim() - 1
    if length == 1:
        places.output.zero_()
        return True
    if not places.output.is_contiguous():
        return False
    source = given
    if not given.is_contiguous():
        for to in (-1, 0):
            moved = given.movedim(dim, to)
            if moved.is_contiguous():
                source, dim = moved, last if to else 0
                break
    if dim < last:
        blocks = reduce.blocks_of(source.shape, source.stride(), dim, dense=source.is_contiguous())
        if blocks is None:
            return False
        _outer(Places(places.prefix, places.element, source, places.output), blocks)
        return True
    if not source.is_contiguous():
        return False
    _inner(Places(places.prefix, places.element, source, places.output), length)
    return True


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
    strides = u32(blocks.dim_stride, blocks.inner_stride, blocks.outer_stride, 0)
    grid = (math.ceil(blocks.inner / reduce.OUTER), segments, outer)
    sizes = (blocks.dim, blocks.inner, segments, 0)
    places.launch(kernel, sizes, grid, (reduce.OUTER, reduce.OUTER, 1), strides=strides, **found)


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
    places.launch(
        f"inner_p1_{places.element}", (rows * segments, each, segments, length), groups, reduce.INNER, **found
    )
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
