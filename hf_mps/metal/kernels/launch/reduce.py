"""Which kernel reduces a tensor's dimensions: inner, outer, in two passes, or any layout (reduction_dispatch_mps)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, u32

GROUP = 1024
"""Most threads of a threadgroup."""
CHAINS = 8
"""Accumulators of a thread of the general kernel (SUM_NCHAINS)."""
INNER = 256
"""Threads of a threadgroup of the inner kernels: eight simdgroups, a row each."""
OUTER = 32
"""Columns, and rows at a time, of a threadgroup of the outer kernels."""
MOST_PARTIALS = 512
DIMENSIONS = 16
"""Dimensions that NormParams has room for."""

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

    release: Release
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
        if len(self.sizes) > DIMENSIONS:
            raise NoRule(f"more than {DIMENSIONS} dimensions")
        if self.given.numel() >= 1 << 31:
            raise NoRule("more elements than 32 bits index")
        name = metal(self.given.dtype)
        self.source = "char" if name == "bool" and self.family in (MAX, MIN) else name
        self.target = "uchar" if self.family.predicate else metal(self.output.dtype)
        if self.target == "bool":
            self.target = "char"

    def check(self) -> None:
        """Raises NoRule where the release has no kernel for these dtypes."""
        if self.kernel_name("") not in self.release:
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
        """The name of the kernel of a layout ("inner", "" for the general one)."""
        middle = f"_{layout}" if layout else ""
        return f"{prefix or self.family.prefix}_reduction{middle}_{source or self.source}_{target or self.target}"

    def inner(self, given: Tensor, rows: int, columns: int, name: str) -> None:
        """A simdgroup for each row."""
        bound = {"input": given, "output": self.output, "sizes": u32(rows, columns)}
        if self.family.divided:
            bound["divisor"] = f32(self.divisor)
        self.release.kernel(name).launch(bound, groups=-(-rows // (INNER // 32)), group=INNER)

    def outer(self) -> None:
        """A threadgroup for each 32 columns, which are read side by side."""
        rows = self.sizes[0]
        columns = self.given.numel() // rows
        bound = {"input": self.given, "output": self.output, "sizes": u32(rows, columns, 1, 0)}
        if self.family.divided:
            bound["divisor"] = f32(self.divisor)
        kernel = self.release.kernel(self.kernel_name("outer"))
        kernel.launch(bound, groups=(-(-columns // OUTER), 1, 1), group=(OUTER, OUTER, 1))

    def in_two_passes(self, groups: int, partial: torch.dtype, flat: bool) -> None:
        """All elements in `groups` slices, then the slices' results; the divisor acts at the end."""
        strided = not self.dense and self.family.divided
        given = self.given if self.dense or strided else self.given.contiguous()
        partials = torch.empty(groups, dtype=partial, device=given.device)
        between = self.target if partial == self.output.dtype or self.family.predicate else metal(partial)
        each = self.length // groups
        layout = "strided" if strided else "flat" if flat else ""
        first = self.release.kernel(self.kernel_name(layout, target=between))
        second = self.release.kernel(self.kernel_name("", between, prefix=self.family.second))
        if layout == "flat":
            first.launch({"input": given, "output": partials, "params": u32(groups, each)}, groups=groups, group=256)
        else:
            sizes, strides = (self.sizes, self.strides) if strided else ([groups, each], [each, 1])
            params = parameters(0.0, each, sizes, strides, [] if strided else [groups, 0], [] if strided else [1, 0])
            first.launch({"input": given, "output": partials, "params": params}, groups=groups, group=simdgroups(each))
        params = parameters(self.divisor, groups, [groups], [1], [1], [0])
        second.launch({"input": partials, "output": self.output, "params": params}, groups=1, group=simdgroups(groups))

    def general(self) -> None:
        """A threadgroup for each result, whatever the strides."""
        params = parameters(self.divisor, self.length, self.sizes, self.strides, self.out_sizes, self.out_strides)
        self.release.kernel(self.kernel_name("")).launch(
            {"input": self.given, "output": self.output, "params": params},
            groups=self.output.numel(),
            group=simdgroups(self.length),
        )


def parameters(
    number: float,
    length: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    out_sizes: Sequence[int],
    out_strides: Sequence[int],
) -> bytes:
    """The bytes of NormParams (kernels/ReduceOps.h)."""
    fields = [*_sixteen(sizes), *_sixteen(strides), *_sixteen(out_sizes), *_sixteen(out_strides)]
    return _PARAMS.pack(number, length, len(sizes), *fields)


def _sixteen(values: Sequence[int]) -> list[int]:
    return [*values, *[0] * (DIMENSIONS - len(values))]


def simdgroups(length: int) -> int:
    """Threads of a threadgroup for `length` elements: whole simdgroups, GROUP at most."""
    return min(GROUP, -(-length // 32) * 32)


def slices(length: int) -> int:
    """The partial results of a reduction of all elements; below two it is done in one pass."""
    if length <= GROUP * CHAINS:
        return 1
    groups = min(MOST_PARTIALS, -(-length // (GROUP * CHAINS)))
    while length % groups:
        groups -= 1
    return groups


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements lie side by side in order, the strides of dimensions of length 1 left aside."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def run(reduction: Reduction) -> None:
    """Launch the kernels of a reduction of elements that are there (reduction_dispatch_mps of 2.13)."""
    results = reduction.output.numel()
    if results > 1 and reduction.dense and is_dense(reduction.out_sizes, reduction.out_strides):
        reduced, last = reduction.reduced, len(reduction.sizes) - 1
        if reduced == [0] and last > 0:
            reduction.outer()
            return
        if reduced == [last]:
            columns = reduction.sizes[-1]
            reduction.inner(
                reduction.given, reduction.given.numel() // columns, columns, reduction.kernel_name("inner")
            )
            return
    groups = slices(reduction.length) if results == 1 else 1
    if groups > 1:
        reduction.in_two_passes(groups, reduction.output.dtype, flat=False)
    else:
        reduction.general()
