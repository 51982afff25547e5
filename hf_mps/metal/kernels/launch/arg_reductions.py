"""argmax and argmin: the position of an extreme, along a dimension or among all elements."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.reduce import DIMENSIONS, INNER, MAX, MIN, OUTER, Family, parameters, simdgroups
from hf_mps.metal.kernels.launch.reduce_split import (
    MOST_SEGMENTS,
    NARROW,
    NARROW_ELEMENTS,
    SPLIT_ROW,
    TALL_STRIDED,
    Blocks,
    collapsed,
    contiguous,
)
from hf_mps.metal.kernels.launch.reductions import REFUSED, SOURCE, kept, reduced, result, wrapped
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import u32


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


MANY_GROUPS, SEGMENT, PARTIALS = 512, 512, 16384
"""Threadgroups that fill the GPU, the least of a segment, and the partial results to aim for (ARG_SPLIT_…)."""


@dataclass(frozen=True)
class Places:
    """Places of extremes to find: kernels' prefix ("argmax") and element, the tensor, and where they go."""

    release: Release
    prefix: str
    element: str
    given: Tensor
    output: Tensor

    def launch(
        self, kernel: str, bound: dict[str, Tensor | bytes | None], groups: tuple[int, ...], group: object
    ) -> None:
        """A kernel of this operator and element; a binding that the pass does not use is left out, as the host does."""
        found = self.release.kernel(f"{self.prefix}_reduction_{kernel}")
        names = {each.name for each in found.signature.bindings}
        found.launch({**dict.fromkeys(names), **bound}, groups=groups, group=group)  # type: ignore[arg-type]


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
        blocks = _blocks(source, dim)
        if blocks is None:
            return False
        _outer(Places(places.release, places.prefix, places.element, source, places.output), blocks)
        return True
    if not source.is_contiguous():
        return False
    _inner(Places(places.release, places.prefix, places.element, source, places.output), length)
    return True


def _blocks(source: Tensor, dim: int) -> Blocks | None:
    sizes = source.shape
    if source.is_contiguous():
        return contiguous(math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :]))
    return collapsed(sizes, source.stride(), dim)


def _outer(places: Places, blocks: Blocks) -> None:
    if not blocks.tall:
        _columns(places, blocks, 1, None)
    elif blocks.inner < OUTER and places.given.is_contiguous():
        segments = min(max(blocks.dim * blocks.inner // NARROW_ELEMENTS, 2), MOST_SEGMENTS)
        _in_segments(places, blocks.inner, segments, lambda values, indices: _narrow(places, blocks, values, indices))
    else:
        segments = min(max(TALL_STRIDED // blocks.groups, 2), min(blocks.dim, MOST_SEGMENTS))
        _in_segments(
            places,
            blocks.inner,
            segments,
            lambda values, indices: _columns(places, blocks, segments, (values, indices)),
        )


def _columns(places: Places, blocks: Blocks, segments: int, partial: tuple[Tensor, Tensor] | None) -> None:
    bound: dict[str, Tensor | bytes | None] = {
        "input": places.given,
        "output": places.output,
        "sizes": u32(blocks.dim, blocks.inner, segments, 0),
        "strides": u32(blocks.dim_stride, blocks.inner_stride, blocks.outer_stride, 0),
    }
    if partial is not None:
        bound["val_out"], bound["idx_out"] = partial
    kernel = f"outer_p1_{places.element}" if partial else f"outer_{places.element}_long"
    grid = (math.ceil(blocks.inner / OUTER), segments, 1 if partial else blocks.outer)
    places.launch(kernel, bound, grid, (OUTER, OUTER, 1))


def _narrow(places: Places, blocks: Blocks, values: Tensor, indices: Tensor) -> None:
    segments = values.shape[1]
    places.launch(
        f"narrow_p1_{places.element}",
        {
            "input": places.given,
            "val_out": values,
            "idx_out": indices,
            "sizes": u32(blocks.dim, blocks.inner, segments, 0),
        },
        (1, segments, 1),
        NARROW // blocks.inner * blocks.inner,
    )


def _inner(places: Places, length: int) -> None:
    rows = places.given.numel() // length
    groups = math.ceil(rows / (INNER // 32))
    if groups >= MANY_GROUPS or length < SPLIT_ROW:
        places.launch(
            f"inner_{places.element}_long",
            {"input": places.given, "output": places.output, "sizes": u32(rows, length, 0, 0)},
            (groups, 1, 1),
            INNER,
        )
        return
    most = min(length // SEGMENT, max(2, PARTIALS // max(rows, 1)))
    each = math.ceil(length / max(most, 2))
    segments = math.ceil(length / each)

    def first(values: Tensor, indices: Tensor) -> None:
        places.launch(
            f"inner_p1_{places.element}",
            {
                "input": places.given,
                "output": places.output,
                "sizes": u32(rows * segments, each, segments, length),
                "val_out": values,
                "idx_out": indices,
            },
            (math.ceil(rows * segments / (INNER // 32)), 1, 1),
            INNER,
        )

    _in_segments(places, rows, segments, first)


def _in_segments(places: Places, results: int, segments: int, first: Callable[[Tensor, Tensor], None]) -> None:
    """The first pass into a value and a place for each segment, then the best of each result's segments."""
    values = places.given.new_empty((results, segments))
    indices = places.given.new_empty((results, segments), dtype=torch.int32)
    first(values, indices)
    places.launch(
        f"combine_{places.element}",
        {"input": values, "output": places.output, "sizes": u32(results, segments, 0, 0), "idx_in": indices},
        (math.ceil(results / (INNER // 32)), 1, 1),
        INNER,
    )
