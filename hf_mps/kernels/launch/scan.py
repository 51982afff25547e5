"""Cumulative operations: sums and products, logarithms of sums of exponentials, extremes with their places."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.kernels.dtypes import metal
from hf_mps.kernels.launch import scan_blocks
from hf_mps.kernels.release import Release
from hf_mps.kernels.rules import out_rule, refuse_misfit, rule
from hf_mps.kernels.runtime import NoRule
from hf_mps.kernels.values import u32, u64

SOURCE = "operations/ScanKernel.mm"
GROUP = 1024
COLUMNS = 32
"""Columns of a threadgroup that scans an outer dimension."""
REFUSED = "PyTorch refuses the arguments"
TINY_TILE = 2048
"""Elements of a threadgroup that scans many short rows."""


def _result(target: Tensor | None, given: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """The result's tensor: integers are summed into int64, in place into what they are."""
    if not -max(given.dim(), 1) <= dim < max(given.dim(), 1):
        raise NoRule(REFUSED)
    whole = not (given.is_floating_point() or given.is_complex())
    if target is None:
        of = dtype or (torch.int64 if whole else given.dtype)
        return torch.empty(given.shape, dtype=of, device=given.device)
    refuse_misfit(target, given.shape, dtype)
    return target


@out_rule("cumsum", source="operations/UnaryOps.mm", outputs=_result, name="cumsum")
@out_rule("cumprod", source="operations/UnaryOps.mm", outputs=_result, name="cumprod")
def cumulative(
    release: Release, result: Tensor, given: Tensor, dim: int, *, name: str, dtype: torch.dtype | None = None
) -> None:
    """Integers narrower than int32 are cast to int32; int32 is summed or multiplied into int64 by the kernel.

    Complex products have kernels of their own.
    """
    if f"{name}_innermost_float" not in release:
        raise NoRule("MPSGraph on this release")
    if not given.dim():
        result.copy_(given)
        return
    dim %= given.dim()
    source = given if dtype is None or dtype == given.dtype else given.to(dtype)
    if source.is_complex() and name == "cumsum":
        _scan(release, name, torch.view_as_real(source), torch.view_as_real(result), dim)
        return
    whole = not (source.is_floating_point() or source.is_complex())
    if whole and source.dtype not in {torch.int32, torch.int64}:
        source = source.to(torch.int32)
        if result.dtype != torch.int64:
            narrow = torch.empty(result.shape, dtype=torch.int32, device=result.device)
            _scan(release, name, source, narrow, dim)
            result.copy_(narrow)
            return
    if source.dtype != result.dtype and not (source.dtype == torch.int32 and result.dtype == torch.int64):
        source = source.to(result.dtype)
    _scan(release, name, source, result, dim)


@rule("_logcumsumexp", "_logcumsumexp.out", source=SOURCE)
def logcumsumexp(release: Release, given: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """Of no dimension: the number itself."""
    rank = given.dim()
    if out is not None:
        refuse_misfit(out, given.shape, given.dtype)
    if not -max(rank, 1) <= dim < max(rank, 1):
        raise NoRule(REFUSED)
    result = torch.empty_like(given, memory_format=torch.contiguous_format) if out is None else out
    if not rank:
        return result.copy_(given)
    _scan(release, "logcumsumexp", given, result, dim % rank)
    return result


@rule("_cummax_helper", source=SOURCE, name="cummax")
@rule("_cummin_helper", source=SOURCE, name="cummin")
def extremes(release: Release, given: Tensor, values: Tensor, indices: Tensor, dim: int, *, name: str) -> None:
    """The largest or smallest so far, and where it is: the last place of equals."""
    rank = given.dim()
    if given.is_complex() or not rank:
        raise NoRule(REFUSED)
    if not values.numel():
        return
    dim %= rank
    source = given.contiguous()
    targets = [each if each.is_contiguous() else each.contiguous() for each in (values, indices)]
    reads = 4 if given.element_size() <= 4 else 2
    kernel = release.kernel(f"{name}_{'innermost' if dim == rank - 1 else 'outer'}_{metal(given.dtype)}")
    _launch(kernel, {"in": source, "out_values": targets[0], "out_indices": targets[1]}, source, dim, reads)
    for asked, made in zip((values, indices), targets, strict=True):
        if asked is not made:
            asked.copy_(made)


def _scan(release: Release, name: str, given: Tensor, result: Tensor, dim: int) -> None:
    """scan_simple_mps_impl: the kernels for long, narrow, short or transposed axes first, then the plain ones."""
    if not result.numel():
        return
    tag = metal(given.dtype)
    if given.dtype != result.dtype:
        tag = f"{tag}_{metal(result.dtype)}"
    form = "innermost" if dim == given.dim() - 1 else "outer"
    if f"{name}_{form}_{tag}" not in release:
        raise NoRule(f"{name}: no kernel for {tag}")
    blocked = f"{name}_block_reduce_{tag}" in release
    if blocked and _transposed(given, result, dim):
        scan_blocks.transposed(release, f"{name}_innermost_transposed_{tag}", given, result)
        return
    source = given.contiguous()
    target = result if result.is_contiguous() else torch.empty(result.shape, dtype=result.dtype, device=result.device)
    length = source.shape[dim]
    scans = source.numel() // length
    if blocked and form == "innermost" and length <= 32 and scans >= 4096:
        _tiny(release, f"{name}_tiny_innermost_{tag}", source, target, length, scans)
    elif not (blocked and scan_blocks.split(release, name, tag, source, target, dim)):
        reads = scan_blocks.reads(result.dtype)
        _launch(release.kernel(f"{name}_{form}_{tag}"), {"in": source, "out": target}, source, dim, reads)
    if target is not result:
        result.copy_(target)


def _launch(kernel: object, tensors: dict[str, Tensor], source: Tensor, dim: int, reads: int) -> None:
    """One threadgroup for each row, or for 32 columns of an outer dimension."""
    length, rank = source.shape[dim], source.dim()
    before = 1
    for size in source.shape[:dim]:
        before *= size
    bound = {**tensors, "axis_size": u64(length)}
    if dim == rank - 1:
        chunk = reads * 32
        threads = GROUP
        if length <= reads * 1024:
            threads = -(-length // chunk) * 32
        elif length <= reads * 2048:
            threads = -(-(length // 2) // chunk) * 32
        kernel.launch(bound, groups=(1, before, 1), group=min(threads, GROUP))  # type: ignore[attr-defined]
        return
    stride = source.stride(dim)
    blocks = -(-stride // COLUMNS)
    bound.update(stride=u64(stride), stride_blocks=u64(blocks))
    kernel.launch(bound, groups=(1, before * blocks, 1), group=COLUMNS // reads * 32)  # type: ignore[attr-defined]


def _tiny(release: Release, kernel: str, source: Tensor, target: Tensor, length: int, scans: int) -> None:
    """Many rows in a threadgroup."""
    rows = TINY_TILE // length
    release.kernel(kernel).launch(
        {"in": source, "out": target, "axis_size": u32(length), "n_scans": u32(scans), "rows_per_tg": u32(rows)},
        groups=-(-scans // rows),
        group=256,
    )


def _transposed(given: Tensor, result: Tensor, dim: int) -> bool:
    """The last dimension is scanned and lies outermost in memory, beside 256 columns or more."""
    rank = given.dim()
    if rank < 2 or dim != rank - 1 or given.is_contiguous() or not result.is_contiguous():
        return False
    return given.numel() // given.shape[-1] >= 256 and given.movedim(-1, 0).is_contiguous()
