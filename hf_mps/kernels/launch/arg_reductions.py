"""argmax and argmin: the position of an extreme, along a dimension or among all elements."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.kernels.dtypes import metal
from hf_mps.kernels.launch.arg_reduce_split import Places, along
from hf_mps.kernels.launch.reduce import DIMENSIONS, INNER, MAX, MIN, OUTER, Family, parameters, simdgroups
from hf_mps.kernels.launch.reductions import REFUSED, SOURCE, kept, reduced, result, wrapped
from hf_mps.kernels.release import Release
from hf_mps.kernels.rules import rule
from hf_mps.kernels.runtime import NoRule
from hf_mps.kernels.values import u32


@rule("argmax", "argmax.out", source=SOURCE, prefix="argmax")
@rule("argmin", "argmin.out", source=SOURCE, prefix="argmin")
def positions(
    release: Release,
    given: Tensor,
    dim: int | None = None,
    keepdim: bool = False,
    *,
    prefix: str,
    out: Tensor | None = None,
) -> Tensor:
    """The first position of the extreme element, or of the first NaN. Of all elements: of the contiguous tensor's."""
    if f"{prefix}_reduction_float_long" not in release:
        raise NoRule("MPSGraph on this release")
    dims = wrapped(dim, given.dim())
    if given.is_complex() or given.dtype == torch.bool or any(given.shape[at] == 0 for at in dims):
        raise NoRule(REFUSED)
    output = result(given, dims, keepdim, torch.int64, out)
    if not output.numel():
        return output
    if not given.dim():
        return output.fill_(0)
    name = metal(given.dtype)
    if dim is None:
        _along(release, prefix, name, given.contiguous().view(-1), 0, output, ([1], [1]), whole=True)
    else:
        _along(release, prefix, name, given, min(dims), output, kept(output, dims, given.dim()), whole=False)
    return output


def _along(
    release: Release,
    prefix: str,
    name: str,
    given: Tensor,
    dim: int,
    output: Tensor,
    layout: tuple[list[int], list[int]],
    *,
    whole: bool,
) -> None:
    if f"{prefix}_reduction_combine_{name}" in release:
        if not along(Places(release, prefix, name, given, output), dim):
            general(release, f"{prefix}_reduction_{name}_long", given, given.shape[dim], output, layout)
        return
    rank, length = given.dim(), given.shape[dim]
    if not whole and rank >= 2 and dim in {0, rank - 1} and given.is_contiguous() and output.is_contiguous():
        rest = given.numel() // length
        if dim == 0:
            release.kernel(f"{prefix}_reduction_outer_{name}_long").launch(
                {"input": given, "output": output, "sizes": u32(length, rest, 1, 0)},
                groups=(-(-rest // OUTER), 1, 1),
                group=(OUTER, OUTER, 1),
            )
        else:
            release.kernel(f"{prefix}_reduction_inner_{name}_long").launch(
                {"input": given, "output": output, "sizes": u32(rest, length)},
                groups=-(-rest // (INNER // 32)),
                group=INNER,
            )
        return
    general(release, f"{prefix}_reduction_{name}_long", given, length, output, layout)


def general(
    release: Release, kernel: str, given: Tensor, length: int, output: Tensor, layout: tuple[list[int], list[int]]
) -> None:
    """A threadgroup for each result, whatever the strides. `layout` is the output's, the dimension kept."""
    if given.dim() > DIMENSIONS:
        raise NoRule(f"more than {DIMENSIONS} dimensions")
    params = parameters(0.0, length, given.shape, given.stride(), *layout)
    release.kernel(kernel).launch(
        {"input": given, "output": output, "params": params}, groups=output.numel(), group=simdgroups(length)
    )


@rule("max", source=SOURCE, family=MAX)
@rule("min", source=SOURCE, family=MIN)
def extreme_of_all(release: Release, given: Tensor, *, family: Family) -> Tensor:
    """The largest or smallest element; MPSGraph before 2.14."""
    _need_segments(release, family)
    if given.is_complex() or not given.numel():
        raise NoRule(REFUSED)
    output = given.new_empty(())
    return reduced(release, family, given, output, set(range(given.dim())))


@rule("max.dim", "max.dim_max", source=SOURCE, family=MAX)
@rule("min.dim", "min.dim_min", source=SOURCE, family=MIN)
def extremes(
    release: Release, given: Tensor, dim: int, keepdim: bool = False, *, family: Family, **out: Tensor
) -> tuple[Tensor, Tensor]:
    """argmax or argmin, then the values; MPSGraph before 2.14."""
    values = out.pop(family.prefix, None)
    indices = next(iter(out.values()), None)
    _need_segments(release, family)
    dims = wrapped(dim, given.dim())
    if given.is_complex() or any(given.shape[at] == 0 for at in dims):
        raise NoRule(REFUSED)
    places = result(given, dims, keepdim, torch.int64, indices)
    output = result(given, dims, keepdim, given.dtype, values)
    if not given.dim():
        output.copy_(given)
        places.zero_()
    elif output.numel():
        source = given.view(torch.int8) if given.dtype == torch.bool else given
        positions(release, source, dim, keepdim, prefix=f"arg{family.prefix}", out=places)
        reduced(release, family, given, output, dims)
    return output, places


def _need_segments(release: Release, family: Family) -> None:
    """Raises NoRule where the release has these on MPSGraph: before reductions in segments."""
    if f"{family.prefix}_reduction_flat_float_float" not in release:
        raise NoRule("MPSGraph on this release")
