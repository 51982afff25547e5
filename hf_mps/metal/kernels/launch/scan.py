"""Cumulative operations: sums and products, logarithms of sums of exponentials, extremes with their places."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.device import machine
from hf_mps.metal.device.faults import FIRST_FAMILIES
from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule, refuse_misfit, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import u32, u64

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
        transposed(release, f"{name}_innermost_transposed_{tag}", given, result)
        return
    source = given.contiguous()
    target = result if result.is_contiguous() else torch.empty(result.shape, dtype=result.dtype, device=result.device)
    length = source.shape[dim]
    scans = source.numel() // length
    if blocked and form == "innermost" and length <= 32 and scans >= 4096:
        # Many rows in a threadgroup.
        rows = TINY_TILE // length
        release.kernel(f"{name}_tiny_innermost_{tag}").launch(
            {"in": source, "out": target, "axis_size": u32(length), "n_scans": u32(scans), "rows_per_tg": u32(rows)},
            groups=-(-scans // rows),
            group=256,
        )
    elif not (blocked and split(release, name, tag, source, target, dim)):
        reads = read_at_once(result.dtype)
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


def _transposed(given: Tensor, result: Tensor, dim: int) -> bool:
    """The last dimension is scanned and lies outermost in memory, beside 256 columns or more."""
    rank = given.dim()
    if rank < 2 or dim != rank - 1 or given.is_contiguous() or not result.is_contiguous():
        return False
    return given.numel() // given.shape[-1] >= 256 and given.movedim(-1, 0).is_contiguous()


REDUCED = {torch.float16, torch.bfloat16}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a scan adds up in."""
    return torch.float32 if dtype in REDUCED else dtype


def read_at_once(dtype: torch.dtype) -> int:
    """Elements that a thread reads at a time, by the size of the accumulator."""
    return 4 if accumulator(dtype).itemsize <= 4 else 2


def transposed(release: Release, kernel: str, given: Tensor, result: Tensor) -> None:
    """The last dimension, which lies outermost: read strided, written contiguous."""
    length = given.shape[-1]
    columns = given.numel() // length
    blocks = -(-columns // 32)
    release.kernel(kernel).launch(
        {"in": given, "out": result, "axis_size": u64(length), "n_cols": u64(columns), "stride_blocks": u64(blocks)},
        groups=(1, blocks, 1),
        group=32 // read_at_once(result.dtype) * 32,
    )


def split(release: Release, name: str, tag: str, source: Tensor, target: Tensor, dim: int) -> bool:
    """Scan a long axis by several threadgroups; False where it is for one alone. Both tensors are contiguous."""
    length = source.shape[dim]
    inner = math.prod(source.shape[dim + 1 :])
    outer = source.numel() // length // inner
    floating = source.is_floating_point()
    back = floating and _looks_back()
    if inner == 1:
        if length < 1 << 16 or outer > 1024:
            return False
        scan = _look_back if back else _blocks
        scan(release, f"{name}_{{}}_{tag}", source, target, length, outer)
        return True
    if length < 1024 or outer * -(-inner // 32) > 64:
        return False
    if back and inner in {2, 4, 8, 16}:
        _narrow_look_back(release, f"{name}_strided_decoupled_{inner}_{{}}_{tag}", source, target, length, inner, outer)
    elif 2 <= inner <= (8 if floating else 4) or inner == 8:
        _vectors(release, f"{name}_vec_block_{{}}_{inner}_{tag}", source, target, length, inner, outer)
    else:
        sums = f"{name}_scan_block_sums_{metal(target.dtype)}"
        _strided(release, f"{name}_strided_block_{{}}_{{}}_{tag}", sums, source, target, length, inner, outer)
    return True


def _looks_back() -> bool:
    """Whether the Mac scans in one pass: M3 or newer with macOS 15, and results may differ in rounding by timing."""
    present = machine.present()
    if present.chip.startswith(FIRST_FAMILIES) or not present.macos_at_least(15):
        return False
    return not torch.are_deterministic_algorithms_enabled()


def _words(count: int, like: Tensor, value: int) -> Tensor:
    return torch.full((count,), value, dtype=torch.int32, device=like.device)


def _look_back(release: Release, name: str, source: Tensor, target: Tensor, length: int, scans: int) -> None:
    """Each threadgroup takes the next tile of 4,096 and adds what the ones before it published."""
    tiles = -(-length // 4096)
    release.kernel(name.format("contig_decoupled")).launch(
        {
            "in": source,
            "out": target,
            "tile_counter": _words(1, source, 0),
            "aggregates": _words(scans * tiles, source, -1),
            "inclusive": _words(scans * tiles, source, -1),
            "axis_size": u32(length),
            "num_tiles": u32(tiles),
        },
        groups=scans * tiles,
        group=256,
    )


def _narrow_look_back(
    release: Release, name: str, source: Tensor, target: Tensor, length: int, inner: int, outer: int
) -> None:
    """As _look_back, for 2 to 16 columns side by side."""
    group = 768 if inner <= 2 else 512
    each = 8 if inner <= 2 else 4 if inner <= 8 else 2
    tiles = -(-length // (group * each))
    total = outer * tiles
    release.kernel(name.format(each)).launch(
        {
            "in": source,
            "out": target,
            "tile_counter": _words(1, source, 0),
            "status": _words(total, source, 0),
            "aggregates": _words(total * inner, source, 0),
            "inclusive": _words(total * inner, source, 0),
            "axis_size": u32(length),
            "num_tiles": u32(tiles),
        },
        groups=total,
        group=group,
    )


def _blocks(release: Release, name: str, source: Tensor, target: Tensor, length: int, scans: int) -> None:
    """Sums of blocks first, then each block with what lies before it."""
    each = 256 * read_at_once(target.dtype)
    count = min(max(math.isqrt(length) // 4, 2), max(1, length // each), 4096)
    size = -(-length // count)
    count = -(-length // size)
    sums = torch.empty((scans, count), dtype=accumulator(target.dtype), device=source.device)
    numbers = {"axis_size": u64(length), "block_size": u64(size), "num_blocks": u64(count)}
    grid = (count, scans, 1)
    release.kernel(name.format("block_reduce")).launch(
        {"in": source, "block_sums": sums, **numbers}, groups=grid, group=256
    )
    release.kernel(name.format("block_carry")).launch(
        {"in": source, "out": target, "block_sums": sums, **numbers}, groups=grid, group=256
    )


def _vectors(release: Release, name: str, source: Tensor, target: Tensor, length: int, inner: int, outer: int) -> None:
    """As _blocks, for 2 to 8 columns that a thread reads together."""
    tile = 64 * read_at_once(target.dtype)
    count = max(min(max(-(-512 // outer), 2), max(1, length // tile)), 1)
    size = math.ceil(math.ceil(length / count) / tile) * tile
    count = -(-length // size)
    sums = torch.empty(outer * count * inner, dtype=accumulator(target.dtype), device=source.device)
    numbers = {"axis_size": u64(length), "block_size": u64(size), "num_blocks": u64(count), "n_orows": u64(outer)}
    grid = (1, outer * count, 1)
    release.kernel(name.format("reduce")).launch({"in": source, "block_sums": sums, **numbers}, groups=grid, group=64)
    release.kernel(name.format("carry")).launch(
        {"in": source, "out": target, "block_sums": sums, **numbers}, groups=grid, group=64
    )


def _strided(
    release: Release,
    name: str,
    sums_name: str,
    source: Tensor,
    target: Tensor,
    length: int,
    inner: int,
    outer: int,
) -> None:
    """As _blocks, for any number of columns in tiles, with a pass between that scans the blocks' sums."""
    widths = (8, 12, 16, 24) if target.is_floating_point() else (8, 16)
    width = next((each for each in widths if inner <= each), 32)
    columns = -(-inner // width)
    count = min(max(-(-4096 // (outer * columns)), 2), max(1, length // 512))
    size = math.ceil(math.ceil(length / count) / 32) * 32
    count = -(-length // size)
    sums = torch.empty((outer * inner, count), dtype=accumulator(target.dtype), device=source.device)
    numbers = {
        "axis_size": u64(length),
        "stride": u64(inner),
        "stride_blocks": u64(columns),
        "block_size": u64(size),
        "num_blocks": u64(count),
        "n_orows": u64(outer),
    }
    grid, group = (1, outer * columns * count, 1), width // read_at_once(target.dtype) * 32
    release.kernel(name.format("reduce", width)).launch(
        {"in": source, "block_sums": sums, **numbers}, groups=grid, group=group
    )
    release.kernel(sums_name).launch(
        {"block_sums": sums, "num_blocks": u64(count)}, groups=(1, outer * inner, 1), group=256
    )
    release.kernel(name.format("carry", width)).launch(
        {"in": source, "out": target, "block_sums": sums, **numbers}, groups=grid, group=group
    )
