"""argmax and argmin as 2.14 chooses them: long axes in segments, each with its extreme and place, then combined."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_mps.kernels.launch.reduce import INNER, OUTER
from hf_mps.kernels.launch.reduce_split import (
    MOST_SEGMENTS,
    NARROW,
    NARROW_ELEMENTS,
    SPLIT_ROW,
    TALL_STRIDED,
    Blocks,
    collapsed,
    contiguous,
)
from hf_mps.kernels.release import Release
from hf_mps.kernels.values import u32

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
