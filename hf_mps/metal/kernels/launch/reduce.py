"""Which kernels reduce a tensor's dimensions: inner, outer, in passes, or any layout (reduction_dispatch_mps)."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.pointwise import is_dense
from hf_mps.metal.kernels.rules import kernels, refuse
from hf_mps.metal.kernels.runtime import Grid
from hf_mps.metal.kernels.values import DIMENSIONS, NoRule, f32, metal, u32

GROUP = 1024
"""Most threads of a threadgroup."""
CHAINS = 8
"""Accumulators of a thread of the general kernel (SUM_NCHAINS)."""
INNER = 256
"""Threads of a threadgroup of the inner kernels: eight simdgroups, a row each."""
OUTER = 32
"""Columns, and rows at a time, of a threadgroup of the outer kernels."""
MOST_PARTIALS = 512

_PARAMS = struct.Struct("<fII64I")


@dataclass(frozen=True)
class Family:
    """The kernels of one reduction: `prefix` begins their names, `second` those that reduce its partial results."""

    prefix: str
    second: str
    divided: bool = False
    """The inner and outer kernels bind a divisor, and a strided kernel does the first pass (the sums)."""
    predicate: bool = False
    """The result is a byte of 0 or 1, whatever the elements are (all, any)."""


SUM = Family("sum", "sum", divided=True)
NANSUM = Family("nansum", "sum", divided=True)
COUNT_NONZERO = Family("count_nonzero", "sum", divided=True)
MAX = Family("max", "max")
MIN = Family("min", "min")
ALL = Family("all", "min", predicate=True)
ANY = Family("any", "max", predicate=True)


@dataclass
class Reduction:
    """One reduction of `given` into `output`, which has its dimensions with the reduced ones kept as 1.

    Sizes and strides are lists here, not views: a kernel gets addresses, and a view costs more than the choice.
    """

    family: Family
    given: Tensor
    output: Tensor
    out_sizes: list[int]
    out_strides: list[int]
    divisor: float = 0.0
    sizes: list[int] = field(init=False)
    strides: list[int] = field(init=False)
    dense: bool = field(init=False)

    def __post_init__(self) -> None:
        self.sizes, self.strides = list(self.given.shape), list(self.given.stride())
        self.dense = self.given.is_contiguous()
        refuse(len(self.sizes) > DIMENSIONS, f"more than {DIMENSIONS} dimensions")
        refuse(self.given.numel() >= 1 << 31, "more elements than 32 bits index")
        name = metal(self.given.dtype)
        # max and min have no kernels for bool, whose bytes have the same order as numbers.
        self.source = "char" if name == "bool" and self.family in (MAX, MIN) else name
        self.target = "uchar" if self.family.predicate else metal(self.output.dtype)
        if self.target == "bool":
            self.target = "char"

    def check(self) -> None:
        """Raise NoRule where the release has no kernel for these dtypes."""
        if self.kernel_name("") not in kernels:
            raise NoRule(f"{self.family.prefix}: no kernel for {self.source} to {self.target}")

    @property
    def reduced(self) -> list[int]:
        """The dimensions that become shorter: one of length 1 is none."""
        return [at for at, (size, left) in enumerate(zip(self.sizes, self.out_sizes, strict=True)) if size != left]

    @property
    def length(self) -> int:
        """Elements that become one."""
        return self.given.numel() // self.output.numel()

    def kernel_name(self, layout: str, source: str | None = None, target: str | None = None, prefix: str = "") -> str:
        """Return the name of the kernel of a layout ("inner", "" for the general one)."""
        middle = f"_{layout}" if layout else ""
        return f"{prefix or self.family.prefix}_reduction{middle}_{source or self.source}_{target or self.target}"

    def launch(self, layout: str, given: Tensor, output: Tensor, groups: Grid, group: Grid, /, **bound: bytes) -> None:
        """Launch a pass from one tensor to another; sums that bind a divisor divide where they write the output.

        The first pass has the kernels of the family's name, the second those of what reduces its partial results.
        """
        if self.family.divided and "sizes" in bound:
            bound["divisor"] = f32(self.divisor if output is self.output else 0.0)
        first = given is self.given
        source, prefix = (self.source, self.family.prefix) if first else (_between(given), self.family.second)
        target = self.target if output is self.output else _between(output)
        kernel = kernels[self.kernel_name(layout, source, target, prefix)]
        kernel.launch({"input": given, "output": output, **bound}, groups=groups, group=group)

    def inner(self, given: Tensor, rows: int, columns: int) -> None:
        """A simdgroup for each row."""
        self.launch("inner", given, self.output, -(-rows // (INNER // 32)), INNER, sizes=u32(rows, columns))

    def outer(self) -> None:
        """A threadgroup for each 32 columns, which are read side by side."""
        rows = self.sizes[0]
        columns = self.given.numel() // rows
        grid = (-(-columns // OUTER), 1, 1), (OUTER, OUTER, 1)
        self.launch("outer", self.given, self.output, *grid, sizes=u32(rows, columns, 1, 0))

    def whole(self, partial: torch.dtype, flat: bool) -> None:
        """Many elements to one result in slices, then the slices' results, where the divisor acts; else in one pass."""
        groups = slices(self.length) if self.output.numel() == 1 else 1
        if groups == 1:
            params = parameters(self.divisor, self.length, self.sizes, self.strides, self.out_sizes, self.out_strides)
            # A threadgroup for each result, whatever the strides.
            self.launch("", self.given, self.output, self.output.numel(), simdgroups(self.length), params=params)
            return
        strided = not self.dense and self.family.divided
        self.given = self.given if self.dense or strided else self.given.contiguous()
        partials = torch.empty(groups, dtype=partial, device=self.given.device)
        each = self.length // groups
        if flat and not strided:
            self.launch("flat", self.given, partials, groups, 256, params=u32(groups, each))
        else:
            sizes, strides = (self.sizes, self.strides) if strided else ([groups, each], [each, 1])
            params = parameters(0.0, each, sizes, strides, [] if strided else [groups, 0], [] if strided else [1, 0])
            self.launch("strided" if strided else "", self.given, partials, groups, simdgroups(each), params=params)
        params = parameters(self.divisor, groups, [groups], [1], [1], [0])
        self.launch("", partials, self.output, 1, simdgroups(groups), params=params)


def parameters(number: float, length: int, sizes: Sequence[int], *others: Sequence[int]) -> bytes:
    """The bytes of NormParams (kernels/ReduceOps.h): `others` are the strides, and sizes and strides of the output."""
    fields = [number for each in (sizes, *others) for number in (*each, *[0] * (DIMENSIONS - len(each)))]
    return _PARAMS.pack(number, length, len(sizes), *fields)


def simdgroups(length: int) -> int:
    """Return threads of a threadgroup for `length` elements: whole simdgroups, GROUP at most."""
    return min(GROUP, -(-length // 32) * 32)


def slices(length: int) -> int:
    """Return the partial results of a reduction of all elements; below two it is done in one pass."""
    if length <= GROUP * CHAINS:
        return 1
    groups = min(MOST_PARTIALS, -(-length // (GROUP * CHAINS)))
    # Slices have one length (elems_per_group): what the division left over would be in none of them.
    while length % groups:
        groups -= 1
    return groups


def run_whole(reduction: Reduction) -> None:
    """Launch the kernels of a reduction of elements that are there (reduction_dispatch_mps of 2.13)."""
    if reduction.output.numel() > 1 and reduction.dense and is_dense(reduction.out_sizes, reduction.out_strides):
        reduced, last = reduction.reduced, len(reduction.sizes) - 1
        if reduced == [0] and last > 0:
            reduction.outer()
            return
        if reduced == [last]:
            reduction.inner(reduction.given, reduction.given.numel() // reduction.sizes[-1], reduction.sizes[-1])
            return
    reduction.whole(torch.uint8 if reduction.family.predicate else reduction.output.dtype, flat=False)


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
    def strides(self) -> bytes:
        """The three, as kernels take them."""
        return u32(self.dim_stride, self.inner_stride, self.outer_stride, 0)

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
    """Return blocks of elements that are side by side."""
    return Blocks(outer, dim, inner, inner, 1, dim * inner)


def collapsed(sizes: Sequence[int], strides: Sequence[int], dim: int) -> Blocks | None:
    """Return the blocks of a tensor whose dimensions before and after `dim` are one each, or None (collapse_dims)."""
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


def run_in_segments(work: Reduction) -> None:
    """Launch the kernels of a reduction of elements that are there (reduction_dispatch_mps of 2.14)."""
    _put_in_order(work)
    reduced, last = work.reduced, len(work.sizes) - 1
    if work.output.numel() > 1 and len(reduced) == 1 and is_dense(work.out_sizes, work.out_strides):
        dim = reduced[0]
        if dim < last:
            blocks = blocks_of(work.sizes, work.strides, dim, dense=work.dense)
            if blocks is not None:
                _outer(work, blocks)
                return
        elif work.dense:
            _inner(work)
            return
    work.whole(partial(work), flat=True)


def partial(work: Reduction) -> torch.dtype:
    """Return the dtype of results between two passes: sums keep their accumulator's."""
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


def blocks_of(sizes: Sequence[int], strides: Sequence[int], dim: int, *, dense: bool) -> Blocks | None:
    """Return the blocks of a tensor, or None where dimensions on one side of `dim` are not one."""
    if not dense:
        return collapsed(sizes, strides, dim)
    return contiguous(math.prod(sizes[:dim]), sizes[dim], math.prod(sizes[dim + 1 :]))


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
    grid = (math.ceil(blocks.inner / OUTER), segments, blocks.outer), (OUTER, height, 1)
    sizes = u32(blocks.dim, blocks.inner, 1, segments)
    work.launch(layout, given, output, *grid, sizes=sizes, strides=blocks.strides)


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
    bound = {"sizes": u32(blocks.dim, blocks.inner, 1, segments), **({"strides": blocks.strides} if strided else {})}
    grid = (1, segments, blocks.outer), NARROW // blocks.inner * blocks.inner
    work.launch("narrow_strided" if strided else "narrow", given, output, *grid, **bound)


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
        work.inner(between, rows, segments)
        return
    work.inner(work.given, rows, columns)


def _chunks(work: Reduction, output: Tensor, rows: int, columns: int, lanes: int, segments: int) -> None:
    groups = math.ceil(math.ceil(rows * segments / (32 // lanes)) / (INNER // 32))
    sizes = u32(rows, columns, lanes, segments)
    work.launch("inner_chunk", work.given, output, groups, INNER, sizes=sizes)


def _between(tensor: Tensor) -> str:
    name = metal(tensor.dtype)
    return "char" if name == "bool" else name
