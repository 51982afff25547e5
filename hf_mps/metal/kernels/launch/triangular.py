"""Triangles of matrices, and the indices of their elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import plane
from hf_mps.metal.kernels.launch.results import as_self
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i32, i64, span, u32

SOURCE = "operations/TriangularOps.mm"


@out_rule("tril", source=SOURCE, outputs=as_self, name="tril")
@out_rule("triu", source=SOURCE, outputs=as_self, name="triu")
def triangle(release: Release, output: Tensor, self: Tensor, diagonal: int = 0, *, name: str) -> None:
    """What is on the diagonal and below, or above: a thread for each element.

    The grid is its column, its row, and all other dimensions; the last dimension counts first.
    """
    if self.dim() < 2:
        raise NoRule("PyTorch refuses fewer than two dimensions")
    count = self.numel()
    if count == 0:
        return
    if max(span(output), span(self)) > 2**31 or abs(diagonal) >= 2**31:
        raise NoRule("no kernel for offsets beyond 32 bits")
    columns, rows = self.shape[-1], self.shape[-2]
    sizes, last = u32(self.shape[::-1]), i32(diagonal, self.dim())
    strides = i32(output.stride()[::-1])
    grid, group = (columns, rows, count // (columns * rows)), plane(columns, rows)[1]
    if output is self:
        kernel = release.kernel(f"{name}_inplace_int_{metal(self.dtype)}")
        kernel.launch({"self": self, "strides": strides, "sizes": sizes, "k_ndim": last}, grid, group)
        return
    arguments = {"out": output, "inp": self, "out_strides": strides, "inp_strides": i32(self.stride()[::-1])}
    kernel = release.kernel(f"{name}_int_{metal(self.dtype)}")
    kernel.launch(arguments | {"sizes": sizes, "k_ndim": last}, grid, group)


@rule("tril_indices", source=SOURCE)
def tril_indices(release: Release, row: int, col: int, offset: int = 0, **options: Any) -> Tensor:
    """Rows above, then columns below, of the elements of a lower triangle: a trapezoid on top of a rectangle."""
    count, first, above = _elements(row, col, offset), _first_row(row, col, offset), max(0, -offset)
    whole = max(0, row - (above + col - first + 1)) * col
    return _indices(release, "tril_indices", row, col, options, above, first, col, count - whole, count)


@rule("triu_indices", source=SOURCE)
def triu_indices(release: Release, row: int, col: int, offset: int = 0, **options: Any) -> Tensor:
    """Rows above, then columns below, of the elements of an upper triangle: a rectangle on top of a trapezoid."""
    count = row * col - _elements(row, col, offset - 1)
    first = max(col - offset, 0) if offset > 0 else col
    whole = min(row, -offset) * col if offset < 0 else 0
    return _indices(release, "triu_indices", row, col, options, max(0, offset), first, col, whole, count)


def _indices(release: Release, name: str, row: int, col: int, options: dict[str, Any], *numbers: int) -> Tensor:
    """The indices by a kernel that takes `numbers`, of which the last is their count."""
    if row < 0 or col < 0 or options.get("layout") not in (None, torch.strided):
        raise NoRule("PyTorch refuses the arguments")
    output = torch.empty((2, numbers[-1]), dtype=options.get("dtype") or torch.int64, device="mps")
    if numbers[-1]:
        release.kernel(f"{name}_{metal(output.dtype)}").launch((output, *map(i64, numbers)), numbers[-1])
    return output


def _first_row(row: int, col: int, offset: int) -> int:
    return min(col, 1 + offset) if offset > 0 else int(row + offset > 0)


def _elements(row: int, col: int, offset: int) -> int:
    """The elements of a lower triangle (get_tril_size in native/TensorFactories.h)."""
    if row == 0 or col == 0:
        return 0
    first, last = _first_row(row, col, offset), max(0, min(col, row + offset))
    rows = max(0, min(row, row + offset))
    leaning = last - first + 1
    return (first + last) * leaning // 2 + max(0, rows - leaning) * col
