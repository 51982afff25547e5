"""Cumulative operations: sums and products, logarithms of sums of exponentials, extremes with their places."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.device import machine
from hf_mps.metal.device.faults import FIRST_FAMILIES
from hf_mps.metal.kernels.rules import kernels, refuse, refuse_unfit, rule
from hf_mps.metal.kernels.runtime import Grid
from hf_mps.metal.kernels.values import metal, u32, u64

# Host: operations/ScanKernel.mm.
GROUP = 1024
COLUMNS = 32
"""Columns of a threadgroup that scans an outer dimension."""
Both = tuple[Tensor, Tensor]
"""What is scanned, and its result."""
TINY_TILE = 2048
"""Elements of a threadgroup that scans many short rows."""


def _result(target: Tensor | None, given: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    """Return the result's tensor: integers are summed into int64, in place into what they are."""
    refuse(not -max(given.dim(), 1) <= dim < max(given.dim(), 1))
    whole = not (given.is_floating_point() or given.is_complex())
    if target is None:
        return torch.empty(given.shape, dtype=dtype or (torch.int64 if whole else given.dtype), device=given.device)
    refuse_unfit(target, given.shape, dtype)
    return target


# Host: operations/UnaryOps.mm.
@rule("cumsum", outputs=_result, name="cumsum")
@rule("cumprod", outputs=_result, name="cumprod")
def cumulative(result: Tensor, given: Tensor, dim: int, *, name: str, dtype: torch.dtype | None = None) -> None:
    """Integers narrower than int32 are cast to int32; int32 is summed or multiplied into int64 by the kernel.

    Complex products have other kernels.
    """
    if not given.dim():
        result.copy_(given)
        return
    dim %= given.dim()
    source = given if dtype is None or dtype == given.dtype else given.to(dtype)
    if source.is_complex() and name == "cumsum":
        _scan(name, torch.view_as_real(source), torch.view_as_real(result), dim)
        return
    whole = not (source.is_floating_point() or source.is_complex())
    if whole and source.dtype not in {torch.int32, torch.int64}:
        source = source.to(torch.int32)
        if result.dtype != torch.int64:
            narrow = torch.empty(result.shape, dtype=torch.int32, device=result.device)
            _scan(name, source, narrow, dim)
            result.copy_(narrow)
            return
    if source.dtype != result.dtype and not (source.dtype == torch.int32 and result.dtype == torch.int64):
        source = source.to(result.dtype)
    _scan(name, source, result, dim)


@rule("_logcumsumexp", outputs=_result)
def logcumsumexp(result: Tensor, given: Tensor, dim: int) -> None:
    """Of no dimension: the number itself."""
    refuse(result.dtype != given.dtype)
    if given.dim():
        _scan("logcumsumexp", given, result, dim % given.dim())
    else:
        result.copy_(given)


@rule("_cummax_helper", name="cummax")
@rule("_cummin_helper", name="cummin")
def extremes(given: Tensor, values: Tensor, indices: Tensor, dim: int, *, name: str) -> None:
    """The largest or smallest so far, and where it is: the last place of equals."""
    rank = given.dim()
    refuse(given.is_complex() or not rank)
    if not values.numel():
        return
    dim %= rank
    source = given.contiguous()
    targets = [each if each.is_contiguous() else each.contiguous() for each in (values, indices)]
    reads = 4 if given.element_size() <= 4 else 2
    kernel = kernels[f"{name}_{'innermost' if dim == rank - 1 else 'outer'}_{metal(given.dtype)}"]
    _launch(kernel, {"in": source, "out_values": targets[0], "out_indices": targets[1]}, source, dim, reads)
    for asked, made in zip((values, indices), targets, strict=True):
        if asked is not made:
            asked.copy_(made)


def _scan(name: str, given: Tensor, result: Tensor, dim: int) -> None:
    """scan_simple_mps_impl: the kernels for long, narrow, short or transposed axes first, then the plain ones."""
    if not result.numel():
        return
    tag = metal(given.dtype)
    if given.dtype != result.dtype:
        tag = f"{tag}_{metal(result.dtype)}"
    form = "innermost" if dim == given.dim() - 1 else "outer"
    refuse(f"{name}_{form}_{tag}" not in kernels, f"{name}: no kernel for {tag}")
    # Logarithms of sums, and products of complex numbers, have the plain kernels alone.
    blocked = f"{name}_block_reduce_{tag}" in kernels
    if blocked and _transposed(given, result, dim):
        transposed(f"{name}_innermost_transposed_{tag}", given, result)
        return
    source = given.contiguous()
    target = result if result.is_contiguous() else torch.empty(result.shape, dtype=result.dtype, device=result.device)
    length = source.shape[dim]
    scans = source.numel() // length
    if blocked and form == "innermost" and length <= 32 and scans >= 4096:
        # Many rows in a threadgroup, of which there would be too many otherwise.
        rows = TINY_TILE // length
        bound = {"in": source, "out": target, "axis_size": u32(length), "n_scans": u32(scans), "rows_per_tg": u32(rows)}
        kernels[f"{name}_tiny_innermost_{tag}"].launch(bound, groups=-(-scans // rows), group=256)
    elif not (blocked and split(name, tag, source, target, dim)):
        reads = read_at_once(result.dtype)
        _launch(kernels[f"{name}_{form}_{tag}"], {"in": source, "out": target}, source, dim, reads)
    if target is not result:
        result.copy_(target)


def _launch(kernel: object, tensors: dict[str, Tensor], source: Tensor, dim: int, reads: int) -> None:
    """One threadgroup for each row, or for 32 columns of an outer dimension."""
    length, rank = source.shape[dim], source.dim()
    before = math.prod(source.shape[:dim])
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
    # The host's strides()[dim]: of one row it may be any number, as in (n, 1).t(), and not the columns beside it. A Mac
    # then leaves columns unwritten, as this does, or writes over what follows the result (the fault lone-scans).
    stride = source.stride(dim)
    refuse(before * length * stride > source.numel(), "its kernel would write beyond the result")
    blocks = -(-stride // COLUMNS)
    bound.update(stride=u64(stride), stride_blocks=u64(blocks))
    kernel.launch(bound, groups=(1, before * blocks, 1), group=COLUMNS // reads * 32)  # type: ignore[attr-defined]


def _transposed(given: Tensor, result: Tensor, dim: int) -> bool:
    """The last dimension is scanned and is outermost in memory, beside 256 columns or more."""
    rank = given.dim()
    if rank < 2 or dim != rank - 1 or given.is_contiguous() or not result.is_contiguous():
        return False
    # Fewer columns than 256 do not fill the GPU (kMinCols).
    return given.numel() // given.shape[-1] >= 256 and given.movedim(-1, 0).is_contiguous()


REDUCED = {torch.float16, torch.bfloat16}


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a scan adds up in."""
    return torch.float32 if dtype in REDUCED else dtype


def read_at_once(dtype: torch.dtype) -> int:
    """Return elements that a thread reads at a time, by the size of the accumulator."""
    return 4 if accumulator(dtype).itemsize <= 4 else 2


def transposed(kernel: str, given: Tensor, result: Tensor) -> None:
    """The last dimension, which is outermost: read strided, written contiguous."""
    length = given.shape[-1]
    columns = given.numel() // length
    blocks = -(-columns // 32)
    bound = {"in": given, "out": result, "axis_size": u64(length), "n_cols": u64(columns), "stride_blocks": u64(blocks)}
    kernels[kernel].launch(bound, groups=(1, blocks, 1), group=32 // read_at_once(result.dtype) * 32)


def split(name: str, tag: str, source: Tensor, target: Tensor, dim: int) -> bool:
    """Scan a long axis by several threadgroups; False where it is for one alone. Both tensors are contiguous."""
    length = source.shape[dim]
    inner = math.prod(source.shape[dim + 1 :])
    outer = source.numel() // length // inner
    both, floating = (source, target), source.is_floating_point()
    back, reads = floating and _looks_back(), read_at_once(target.dtype)
    if (length < 1 << 16 or outer > 1024) if inner == 1 else (length < 1024 or outer * -(-inner // 32) > 64):
        return False

    def numbers(size: int, **others: int) -> dict[str, bytes]:
        sizes = {"axis_size": length, "block_size": size, "num_blocks": -(-length // size), **others}
        return {name: u64(number) for name, number in sizes.items()}

    if back and inner in {1, 2, 4, 8, 16}:
        form = "contig_decoupled" if inner == 1 else f"strided_decoupled_{inner}_{{}}"
        _look_back(f"{name}_{form}_{tag}", source, target, length, outer, inner)
    elif inner == 1:
        # By PyTorch's measurements a quarter of the root is fastest from 65,536 elements to 16 M.
        most = min(max(math.isqrt(length) // 4, 2), max(1, length // (256 * reads)), 4096)
        size = -(-length // most)
        count = -(-length // size)
        _in_blocks(f"{name}_block_{{}}_{tag}", both, numbers(size), (outer, count), (count, outer, 1), 256)
    elif 2 <= inner <= (8 if floating else 4) or inner == 8:
        # A thread reads the columns together.
        most = max(min(max(-(-512 // outer), 2), max(1, length // (64 * reads))), 1)
        size = math.ceil(math.ceil(length / most) / (64 * reads)) * 64 * reads
        count = -(-length // size)
        form, shape = f"{name}_vec_block_{{}}_{inner}_{tag}", (outer * count * inner,)
        _in_blocks(form, both, numbers(size, n_orows=outer), shape, (1, outer * count, 1), 64)
    else:
        # Columns in tiles, with a pass between that scans the blocks' sums.
        # The narrowest tile that holds the columns, so that few threads idle; integers have three widths, floats five.
        widths = (8, 12, 16, 24) if target.is_floating_point() else (8, 16)
        width = next((each for each in widths if inner <= each), 32)
        columns = -(-inner // width)
        # Three passes cost more than blocks shorter than 512 elements save (kMinBlock).
        most = min(max(-(-4096 // (outer * columns)), 2), max(1, length // 512))
        size = math.ceil(math.ceil(length / most) / 32) * 32
        count = -(-length // size)
        sizes = numbers(size, stride=inner, stride_blocks=columns, n_orows=outer)
        form, grid = f"{name}_strided_block_{{}}_{width}_{tag}", (1, outer * columns * count, 1)
        # By the output's dtype alone: int32 that is summed into int64 has the sums of int64.
        sums = f"{name}_scan_block_sums_{metal(target.dtype)}"
        _in_blocks(form, both, sizes, (outer * inner, count), grid, width // reads * 32, sums)
    return True


def _looks_back() -> bool:
    """Whether the Mac scans in one pass: M3 or newer with macOS 15, and results may differ in rounding by timing."""
    present = machine.present()
    newer = present.macos_at_least(15) and not present.chip.startswith(FIRST_FAMILIES)
    return newer and not torch.are_deterministic_algorithms_enabled()


def _look_back(name: str, source: Tensor, target: Tensor, length: int, outer: int, inner: int) -> None:
    """Each threadgroup takes the next tile and adds what the ones before it published."""
    group, each = (256, 16) if inner == 1 else (768, 8) if inner == 2 else (512, 4 if inner <= 8 else 2)
    tiles = -(-length // (group * each))

    def words(count: int, value: int) -> Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=source.device)

    bound: dict[str, Tensor | bytes] = {"in": source, "out": target, "tile_counter": words(1, 0)}
    bound |= {"axis_size": u32(length), "num_tiles": u32(tiles)}
    # One column publishes by the value itself, several by a word of their tile.
    unknown = -1 if inner == 1 else 0
    bound |= {part: words(outer * tiles * inner, unknown) for part in ("aggregates", "inclusive")}
    if inner > 1:
        bound["status"] = words(outer * tiles, 0)
    kernels[name.format(each)].launch(bound, groups=outer * tiles, group=group)


def _in_blocks(
    form: str, both: Both, numbers: dict[str, bytes], shape: tuple[int, ...], grid: Grid, group: int, between: str = ""
) -> None:
    """Sums of blocks first, then each block with what comes before it; `between` scans the sums."""
    source, target = both
    sums = torch.empty(shape, dtype=accumulator(target.dtype), device=source.device)
    bound = {"in": source, "block_sums": sums, **numbers}
    kernels[form.format("reduce")].launch(bound, groups=grid, group=group)
    if between:
        scanned = {"block_sums": sums, "num_blocks": numbers["num_blocks"]}
        kernels[between].launch(scanned, groups=(1, shape[0], 1), group=256)
    kernels[form.format("carry")].launch({**bound, "out": target}, groups=grid, group=group)
