"""Scans of few, long axes: several threadgroups for each, in one pass that looks back or in passes over blocks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.device import machine
from hf_mps.device.faults import FIRST_FAMILIES
from hf_mps.kernels.dtypes import metal
from hf_mps.kernels.release import Release
from hf_mps.kernels.values import u32, u64

REDUCED = {torch.float16, torch.bfloat16}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a scan adds up in."""
    return torch.float32 if dtype in REDUCED else dtype


def reads(dtype: torch.dtype) -> int:
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
        group=32 // reads(result.dtype) * 32,
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
    each = 256 * reads(target.dtype)
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
    tile = 64 * reads(target.dtype)
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
    grid, group = (1, outer * columns * count, 1), width // reads(target.dtype) * 32
    release.kernel(name.format("reduce", width)).launch(
        {"in": source, "block_sums": sums, **numbers}, groups=grid, group=group
    )
    release.kernel(sums_name).launch(
        {"block_sums": sums, "num_blocks": u64(count)}, groups=(1, outer * inner, 1), group=256
    )
    release.kernel(name.format("carry", width)).launch(
        {"in": source, "out": target, "block_sums": sums, **numbers}, groups=grid, group=group
    )
