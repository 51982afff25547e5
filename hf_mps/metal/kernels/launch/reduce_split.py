"""Reductions as 2.14 chooses them: views collapsed, short and narrow shapes packed, long ones in segments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.reduce import INNER, OUTER, Reduction, is_dense, slices
from hf_mps.metal.kernels.values import f32, u32

if TYPE_CHECKING:
    from collections.abc import Sequence

# The thresholds of kernels/ReduceOps.h.
CHUNK_ROW, CHUNK_LANE, CHUNK_ELEMENTS = 256, 16, 65536
SPLIT_ROW, SPLIT_SEGMENT, MOST_SEGMENTS, SPLIT_PARTIALS, SPLIT_GROUPS = 2048, 64, 2048, 8192, 64
NARROW, NARROW_LONG, NARROW_ELEMENTS = 256, 128, 8192
SMALL, TALL, TALL_GROUPS, TALL_SEGMENT, TALL_MOST, TALL_STRIDED = 256, 4096, 32, 512, 2048, 256

_OPMATH = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


class Blocks(NamedTuple):
    """A tensor as [outer, dim, inner] with dim reduced, and the strides of the three."""

    outer: int
    dim: int
    inner: int
    dim_stride: int
    inner_stride: int
    outer_stride: int

    @property
    def groups(self) -> int:
        """Threadgroups of 32 columns each."""
        return self.outer * math.ceil(self.inner / OUTER)

    @property
    def small(self) -> bool:
        """A thread walks the whole of dim: it is short, and there are columns to fill the GPU."""
        return self.dim <= SMALL and self.groups >= SPLIT_GROUPS

    @property
    def tall(self) -> bool:
        """Few columns and a long dim, which is cut into segments."""
        return self.outer == 1 and self.groups < TALL_GROUPS and self.dim >= TALL


def contiguous(outer: int, dim: int, inner: int) -> Blocks:
    """Blocks of elements that lie side by side."""
    return Blocks(outer, dim, inner, inner, 1, dim * inner)


def collapsed(sizes: Sequence[int], strides: Sequence[int], dim: int) -> Blocks | None:
    """The blocks of a tensor whose dimensions before and after `dim` are one each, or None (collapse_dims)."""
    sides = []
    for span in (range(dim), range(dim + 1, len(sizes))):
        merged: list[tuple[int, int]] = []
        for at in span:
            if sizes[at] == 1:
                continue
            if merged and merged[-1][1] == sizes[at] * strides[at]:
                merged[-1] = (merged[-1][0] * sizes[at], strides[at])
            else:
                merged.append((sizes[at], strides[at]))
        if len(merged) > 1:
            return None
        sides.append(merged[0] if merged else (1, 0))
    (outer, outer_stride), (inner, inner_stride) = sides
    return Blocks(outer, sizes[dim], inner, strides[dim], inner_stride, outer_stride)


def run(work: Reduction) -> None:
    """Launch the kernels of a reduction of elements that are there (reduction_dispatch_mps of 2.14)."""
    _put_in_order(work)
    results = work.output.numel()
    reduced, last = work.reduced, len(work.sizes) - 1
    if results > 1 and len(reduced) == 1 and is_dense(work.out_sizes, work.out_strides):
        dim = reduced[0]
        if dim < last:
            blocks = _blocks(work, dim)
            if blocks is not None:
                _outer(work, blocks)
                return
        elif work.dense:
            _inner(work)
            return
    groups = slices(work.length) if results == 1 else 1
    if groups > 1:
        work.in_two_passes(groups, partial(work), flat=True)
    else:
        work.general()


def partial(work: Reduction) -> torch.dtype:
    """The dtype of results between two passes: sums keep their accumulator's."""
    if work.family.predicate:
        return torch.uint8
    return _OPMATH.get(work.output.dtype, work.output.dtype) if work.family.divided else work.output.dtype


def _put_in_order(work: Reduction) -> None:
    """A tensor that is dense in another order of its dimensions is taken in that order."""
    if work.dense:
        return
    order = sorted(range(len(work.sizes)), key=lambda at: -work.strides[at])
    sizes, strides = [work.sizes[at] for at in order], [work.strides[at] for at in order]
    if is_dense(sizes, strides):
        work.sizes, work.strides, work.dense = sizes, strides, True
        work.out_sizes = [work.out_sizes[at] for at in order]
        work.out_strides = [work.out_strides[at] for at in order]


def _blocks(work: Reduction, dim: int) -> Blocks | None:
    if not work.dense:
        return collapsed(work.sizes, work.strides, dim)
    return contiguous(math.prod(work.sizes[:dim]), work.sizes[dim], math.prod(work.sizes[dim + 1 :]))


def _outer(work: Reduction, blocks: Blocks) -> None:
    """A dimension that is not the last."""
    narrow = work.dense or work.family.divided  # the kernel for strides is the sums' alone
    short = blocks.small and blocks.dim < NARROW_LONG
    if narrow and blocks.inner < OUTER and work.given.numel() >= CHUNK_ELEMENTS and not short:
        _narrow(work, blocks)
        return
    if not blocks.tall:
        _by_columns(work, work.given, work.output, blocks)
        return
    if work.dense:
        segments = min(blocks.dim // TALL_SEGMENT, max(2, TALL_MOST // blocks.groups))
    else:
        segments = min(max(TALL_STRIDED // blocks.groups, 2), min(blocks.dim, MOST_SEGMENTS))
    between = torch.empty((segments, blocks.inner), dtype=partial(work), device=work.given.device)
    _by_columns(work, work.given, between, blocks, segments)
    _by_columns(work, between, work.output, contiguous(1, segments, blocks.inner))


def _by_columns(work: Reduction, given: Tensor, output: Tensor, blocks: Blocks, segments: int = 1) -> None:
    """A threadgroup for 32 columns: 32 rows at a time, or one thread a column where dim is short."""
    layout = "outer_small_dim" if blocks.small and segments == 1 and given is work.given else "outer"
    height = 1 if layout == "outer_small_dim" else OUTER
    bound = _bound(work, given, output, u32(blocks.dim, blocks.inner, 1, segments))
    bound["strides"] = u32(blocks.dim_stride, blocks.inner_stride, blocks.outer_stride, 0)
    work.release.kernel(_name(work, layout, given, output)).launch(
        bound, groups=(math.ceil(blocks.inner / OUTER), segments, blocks.outer), group=(OUTER, height, 1)
    )


def _narrow(work: Reduction, blocks: Blocks) -> None:
    """Fewer columns than a simdgroup has threads: whole rows in a threadgroup, in segments where there are many."""
    segments = 1
    if blocks.outer == 1:
        segments = min(max(blocks.dim * blocks.inner // NARROW_ELEMENTS, 1), MOST_SEGMENTS)
    if segments == 1:
        _by_rows(work, work.given, work.output, blocks, 1)
        return
    between = torch.empty((segments, blocks.inner), dtype=partial(work), device=work.given.device)
    _by_rows(work, work.given, between, blocks, segments)
    _by_rows(work, between, work.output, contiguous(1, segments, blocks.inner), 1)


def _by_rows(work: Reduction, given: Tensor, output: Tensor, blocks: Blocks, segments: int) -> None:
    strided = given is work.given and not work.dense
    bound = _bound(work, given, output, u32(blocks.dim, blocks.inner, 1, segments))
    if strided:
        bound["strides"] = u32(blocks.dim_stride, blocks.inner_stride, blocks.outer_stride, 0)
    active = NARROW // blocks.inner * blocks.inner
    work.release.kernel(_name(work, "narrow_strided" if strided else "narrow", given, output)).launch(
        bound, groups=(1, segments, blocks.outer), group=active
    )


def _inner(work: Reduction) -> None:
    """The last dimension: several short rows in a simdgroup, few long rows in segments, else a simdgroup each."""
    columns = work.sizes[-1]
    rows = work.given.numel() // columns
    if columns <= CHUNK_ROW and work.given.numel() >= CHUNK_ELEMENTS:
        lanes = min(32, 1 << (math.ceil(columns / CHUNK_LANE) - 1).bit_length())
        _chunks(work, work.output, rows, columns, lanes, 1)
        return
    if math.ceil(rows / (INNER // 32)) < SPLIT_GROUPS and columns >= SPLIT_ROW:
        most = max(min(MOST_SEGMENTS, math.ceil(columns / SPLIT_SEGMENT)), 2)
        segments = min(max(math.ceil(SPLIT_PARTIALS / rows), 2), most)
        segments = math.ceil(columns / math.ceil(columns / segments))
        between = torch.empty((rows, segments), dtype=partial(work), device=work.given.device)
        _chunks(work, between, rows, columns, 32, segments)
        work.inner(between, rows, segments, _name(work, "inner", between, work.output))
        return
    work.inner(work.given, rows, columns, work.kernel_name("inner"))


def _chunks(work: Reduction, output: Tensor, rows: int, columns: int, lanes: int, segments: int) -> None:
    simdgroups = math.ceil(rows * segments / (32 // lanes))
    bound = _bound(work, work.given, output, u32(rows, columns, lanes, segments))
    work.release.kernel(_name(work, "inner_chunk", work.given, output)).launch(
        bound, groups=math.ceil(simdgroups / (INNER // 32)), group=INNER
    )


def _bound(work: Reduction, given: Tensor, output: Tensor, sizes: bytes) -> dict[str, Tensor | bytes]:
    """The arguments of a pass: sums divide in the pass that writes the output."""
    bound: dict[str, Tensor | bytes] = {"input": given, "output": output, "sizes": sizes}
    if work.family.divided:
        bound["divisor"] = f32(work.divisor if output is work.output else 0.0)
    return bound


def _name(work: Reduction, layout: str, given: Tensor, output: Tensor) -> str:
    """The kernel of a pass: the first has the family's name, the second that of what reduces partial results."""
    first = given is work.given
    source = work.source if first else _between(given)
    target = work.target if output is work.output else _between(output)
    return work.kernel_name(layout, source, target, work.family.prefix if first else work.family.second)


def _between(tensor: Tensor) -> str:
    name = metal(tensor.dtype)
    return "char" if name == "bool" else name
