"""Reductions to values: sum, mean, amax, any and their like, over some dimensions or all."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch import reduce, reduce_split
from hf_mps.metal.kernels.launch.reduce import ALL, ANY, COUNT_NONZERO, MAX, MIN, NANSUM, SUM, Family, Reduction
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import refuse_misfit, rule
from hf_mps.metal.kernels.runtime import NoRule

SOURCE = "operations/ReduceOps.mm"
REFUSED = "PyTorch refuses the arguments"


def wrapped(dims: Sequence[int] | int | None, rank: int) -> set[int]:
    """The dimensions meant, counted from 0; all of them for None or none. Raises NoRule where PyTorch refuses."""
    if dims is None:
        return set(range(rank))
    given = [dims] if isinstance(dims, int) else dims
    if not given:
        return set(range(rank))
    limit = max(rank, 1)
    found = {each % limit for each in given}
    if len(found) != len(given) or any(not -limit <= each < limit for each in given):
        raise NoRule(REFUSED)
    return found if rank else set()


def result(given: Tensor, dims: set[int], keepdim: bool, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """A new tensor for the result, or `out` where it has that shape and dtype."""
    if keepdim:
        shape = [1 if at in dims else size for at, size in enumerate(given.shape)]
    else:
        shape = [size for at, size in enumerate(given.shape) if at not in dims]
    if out is None:
        return given.new_empty(shape, dtype=dtype)
    refuse_misfit(out, shape, dtype)
    return out


def kept(output: Tensor, dims: set[int], rank: int) -> tuple[list[int], list[int]]:
    """Sizes and strides of the output with the reduced dimensions kept."""
    if output.dim() == rank:
        return list(output.shape), list(output.stride())
    sizes, strides = [], []
    rest = iter(zip(output.shape, output.stride(), strict=True))
    for at in range(rank):
        size, stride = (1, 0) if at in dims else next(rest)
        sizes.append(size)
        strides.append(stride)
    return sizes, strides


def reduced(
    release: Release,
    family: Family,
    given: Tensor,
    output: Tensor,
    dims: set[int],
    *,
    divisor: float = 0.0,
) -> Tensor:
    """`output`, with what there is to reduce reduced into it."""
    if given.numel() and output.numel():
        sizes, strides = kept(output, dims, given.dim())
        work = Reduction(release, family, given, output, sizes, strides, divisor)
        work.check()
        in_segments = work.kernel_name("flat") in release
        (reduce_split if in_segments else reduce).run(work)
    return output


@rule("sum.dim_IntList", "sum.IntList_out", source=SOURCE, family=SUM)
@rule("nansum", "nansum.out", source=SOURCE, family=NANSUM)
def sums(
    release: Release,
    given: Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    family: Family,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Elements are cast to the result's dtype before, integers to int64; nansum of integers is their sum."""
    if given.is_complex() and family is NANSUM:
        raise NoRule(REFUSED)
    dims = wrapped(dim, given.dim())
    wanted = dtype or (out.dtype if out is not None else None)
    if wanted is None:
        wanted = given.dtype if given.dtype.is_floating_point or given.dtype.is_complex else torch.int64
    output = result(given, dims, keepdim, wanted, out)
    family = family if given.is_floating_point() and (wanted.is_floating_point or wanted.is_complex) else SUM
    _need(release, SUM)
    if not given.numel():
        return output.zero_()
    return reduced(release, family, given if given.dtype == wanted else given.to(wanted), output, dims)


@rule("mean.dim", "mean.out", source=SOURCE)
def means(
    release: Release,
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
    if not (wanted.is_floating_point or wanted.is_complex):
        raise NoRule(REFUSED)
    output = result(given, dims, keepdim, wanted, out)
    _need(release, SUM)
    if not given.numel():
        return output.fill_(math.nan)
    divisor = given.numel() / output.numel()
    return reduced(release, SUM, given if given.dtype == wanted else given.to(wanted), output, dims, divisor=divisor)


@rule("trace", source=SOURCE)
def trace(release: Release, given: Tensor) -> Tensor:
    """The sum of the diagonal."""
    if given.dim() != 2:
        raise NoRule(REFUSED)
    _need(release, SUM)
    return given.diagonal().sum()


@rule("count_nonzero.dim_IntList", source=SOURCE)
def counts(release: Release, given: Tensor, dim: Sequence[int]) -> Tensor:
    """Elements that are not 0, by dimension."""
    dims = wrapped(dim, given.dim())
    output = result(given, dims, False, torch.int64, None)
    _need(release, COUNT_NONZERO)
    return reduced(release, COUNT_NONZERO, given, output, dims) if given.numel() else output.zero_()


@rule("amax", "amax.out", source=SOURCE, family=MAX)
@rule("amin", "amin.out", source=SOURCE, family=MIN)
def extreme(
    release: Release,
    given: Tensor,
    dim: Sequence[int] = (),
    keepdim: bool = False,
    *,
    family: Family,
    out: Tensor | None = None,
) -> Tensor:
    """The largest or the smallest, NaN where there is one."""
    dims = wrapped(dim, given.dim())
    if given.is_complex() or any(given.shape[at] == 0 for at in dims):
        raise NoRule(REFUSED)
    _need(release, family)
    return reduced(release, family, given, result(given, dims, keepdim, given.dtype, out), dims)


@rule("aminmax", source=SOURCE)
def both(release: Release, given: Tensor, *, dim: int | None = None, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """amin, then amax."""
    dims = () if dim is None else (dim,)
    if dim is None and keepdim:
        raise NoRule("aminmax over all dimensions that keeps them")
    smallest: Tensor = extreme(release, given, dims, keepdim, family=MIN)
    largest: Tensor = extreme(release, given, dims, keepdim, family=MAX)
    return smallest, largest


@rule("all", "all.all_out", "all.dim", "all.out", source="../ReduceOps.cpp", family=ALL)
@rule("any", "any.all_out", "any.dim", "any.out", source="../ReduceOps.cpp", family=ANY)
def decided(
    release: Release,
    given: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    family: Family,
    out: Tensor | None = None,
) -> Tensor:
    """Whether no element is 0, or one is not, along a dimension or of all.

    A byte for uint8 and bool for the others, as NumPy has it; one element is copied and never reduced.
    """
    dims = wrapped(dim, given.dim())
    output = result(given, dims, keepdim, torch.uint8 if given.dtype == torch.uint8 else torch.bool, out)
    _need(release, family)
    if given.numel() == 0:
        return output.fill_(family is ALL)
    if given.numel() == 1:
        return output.copy_(given.view_as(output).to(torch.bool))
    return reduced(release, family, given, output, dims)


def _need(release: Release, family: Family) -> None:
    """Raises NoRule where the release reduces with MPSGraph."""
    kind = "float_uchar" if family.predicate else "float_long" if family is COUNT_NONZERO else "float_float"
    if f"{family.prefix}_reduction_{kind}" not in release:
        raise NoRule("MPSGraph on this release")
