"""Sorting, the k largest and the k-th smallest, where values belong in sorted boundaries, and histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import by_meta, kernels, refuse, rule
from hf_mps.metal.kernels.values import i32, i64, metal, u8, u32, u64

# Host: operations/Bucketization.mm.
SEARCHERS = 1024


@rule("searchsorted.Tensor", "searchsorted.Scalar", outputs=by_meta)
def searchsorted(
    result: Tensor,
    boundaries: Tensor,
    given: Tensor | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> None:
    """A thread for each value; inputs of two dtypes are promoted to one. What PyTorch refuses has no rule.

    A number becomes a tensor of no dimension on the device, which counts less than one in promotion.
    """
    if not isinstance(given, Tensor):
        given = torch.tensor(given, dtype=torch.result_type(boundaries, given), device=boundaries.device)
    batch = boundaries.dim() != 1
    refuse(not boundaries.dim() or (batch and boundaries.shape[:-1] != given.shape[:-1]))
    refuse(side not in {None, "left", "right"} or (side == "left" and right))
    refuse(sorter is not None and (sorter.shape != boundaries.shape or sorter.dtype != torch.int64))
    if boundaries.dtype != given.dtype or not (boundaries.is_mps and given.is_mps):
        common = torch.result_type(boundaries, given)
        boundaries, given = boundaries.to(common), given.to(boundaries.device, common)
    if not given.numel():
        return
    found = result if result.is_contiguous() else result.contiguous()
    kernel = f"searchsorted_{metal(given.dtype)}_{metal(result.dtype)}"
    bound: dict[str, Tensor | bytes] = {"data_in": given.contiguous(), "data_bd": boundaries.contiguous()}
    bound["data_out"] = found
    bound |= {"idim_in": i64(given.shape[-1] if given.dim() else 1), "idim_bd": i64(boundaries.shape[-1])}
    bound |= {"numel_in": i64(given.numel()), "is_1d_boundaries": i64(not batch)}
    bound["right"] = i64(right or side == "right")
    if sorter is not None:
        kernel, bound["data_sort"] = f"{kernel}_sorter", sorter.contiguous()
    # The host asks the compiled kernel for its most threads, and has 1,024 threadgroups at most (maxThreadgroups).
    threads = min(SEARCHERS, given.numel())
    kernels[kernel].launch(bound, groups=min(1024, -(-given.numel() // threads)), group=threads)
    if found is not result:
        result.copy_(found)


@rule("bucketize.Tensor", "bucketize.Scalar", outputs=by_meta)
def bucketize(result: Tensor, given: Tensor | float, boundaries: Tensor, **options: Any) -> None:
    """searchsorted in boundaries of one dimension."""
    refuse(boundaries.dim() != 1)
    searchsorted(result, boundaries, given, **options)


LINEAR = 0
"""Bins of one width: the bin is computed, not searched for (BIN_SELECTION_ALGORITHM)."""
NO_WEIGHT = -1


# Host: operations/HistogramKernel.mm.
@rule("histc", outputs=by_meta)
def histc(output: Tensor, given: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> None:
    """Elements outside the edges, and NaN, count nowhere. Equal edges are the least and the greatest element."""
    refuse(not given.is_floating_point(), "no rule yet for whole numbers")
    refuse(bins <= 0 or not given.numel(), "no element, or what PyTorch refuses")
    kernel = kernels[f"histogramdd_{metal(given.dtype)}"]
    # The outer edges (histc_select_outer_bin_edges of Histogram.cpp).
    first, last = float(min), float(max)
    if first == last:
        first, last = (each.item() for each in torch.aminmax(given))
    if first == last:
        first, last = first - 1, last + 1
    refuse(not (math.isfinite(first) and math.isfinite(last) and first < last))
    edges = torch.linspace(first, last, bins + 1, dtype=given.dtype, device=given.device).cpu()
    source = given.reshape(given.numel(), 1)
    count = source.shape[0]
    places = torch.empty(count, dtype=torch.int32, device=given.device)
    layout = {"strides": u32(*source.stride()), "iter_shape": u32(*source.shape), "num_dimensions": u32(2)}
    kernels["kernel_index_offset"].launch({**layout, "data_offsets": places}, count)
    of_each = torch.zeros((count, bins), dtype=given.dtype, device=given.device)
    bound = {"input_": source, "weight": None, "local_out": of_each, "offsets": places, "num_dims": u64(1)}
    bound |= {"bin_seq": _bytes(edges), "leftmost_edge": _bytes(edges[:1]), "rightmost_edge": _bytes(edges[-1:])}
    bound |= {"num_bin_edges": i64(bins + 1), "local_out_strides": i64(bins, 1), "weight_stride": i64(NO_WEIGHT)}
    kernel.launch({**bound, "algorithm": u8(LINEAR)}, count)
    torch.sum(of_each, 0, out=output)


def _bytes(edges: Tensor) -> bytes:
    return edges.contiguous().view(torch.uint8).numpy().tobytes()


# Host: operations/Sort.mm.
EACH = 4
"""Elements that a thread sorts (ILP_PER_THREAD)."""
Pair = tuple[Tensor, Tensor]


@rule("sort.stable", outputs=by_meta)
def sort(outputs: Pair, given: Tensor, *, stable: bool | None, dim: int = -1, descending: bool = False) -> None:
    """Without `stable` equal elements come in the order that the blocks' merge leaves."""
    _sorted(Work(given, *outputs, dim % max(given.dim(), 1), descending, bool(stable)))


@rule("topk", outputs=by_meta)
def topk(outputs: Pair, given: Tensor, k: int, dim: int = -1, largest: bool = True, *_: bool) -> None:
    """The first k of a sort, in order whether that is asked for or not."""
    if not given.numel() or not k:
        return
    rank = max(given.dim(), 1)
    if dim % rank == rank - 1:
        _sorted(Work(given, *outputs, rank - 1, largest, False, k))
        return
    source = given.movedim(dim, -1).contiguous()
    shape = [*source.shape[:-1], k]
    found = given.new_empty(shape), given.new_empty(shape, dtype=torch.int64)
    _sorted(Work(source, *found, rank - 1, largest, False, k))
    for output, each in zip(outputs, found, strict=True):
        output.copy_(each.movedim(-1, dim))


def _sorted(work: Work) -> None:
    """sort_out_mps_impl: digits for few rows of small elements, else one block a row, else blocks that are merged."""
    given = work.given
    refuse(f"sort_block_{metal(given.dtype)}_tptg32" not in kernels, f"no kernel for {given.dtype}")
    if not given.numel():
        return
    if not given.dim() or given.shape[work.dim] <= 1:
        work.values.copy_(given.view(work.values.shape) if given.numel() == work.values.numel() else given)
        work.indices.zero_()
        return
    made = work.dense()
    group = _group(made.size, given.element_size(), made.rows)
    if _digits(made, group):
        by_digits(made)
    else:
        _by_blocks(made, group)
    if made is not work:
        work.values.copy_(made.values)
        work.indices.copy_(made.indices)


def _group(size: int, element: int, rows: int) -> int:
    """Return threads of a threadgroup (select_tptg): a power of two, fewer for few rows so that several share one."""
    wanted = math.ceil(size / EACH)
    if rows <= 2 and size > 2048:
        # Few rows are cut into more blocks, about four in all, so that the GPU has several threadgroups to run.
        wanted = min(wanted, max(2048, math.ceil(size / max(1, 4 // rows))) // EACH)
    group = min(max(1 << (max(wanted, 1) - 1).bit_length(), 32), 1024)
    # An element of 8 bytes takes 12 of threadgroup memory with its place: 1,024 threads would need 48 KiB of 32.
    return min(group, 512 if rows <= 256 else 256) if element > 4 else group


def _digits(work: Work, group: int) -> bool:
    """Return whether counting digits needs no more launches than merging (should_use_radix)."""
    element = work.given.element_size()
    if element > 4:
        return False
    # Two passes over digits, and no comparison that has to look for NaN.
    if work.given.is_floating_point() and element == 2 and work.size >= 2048:
        return True
    # Where rows fill the GPU, a merge hides its rounds behind them, and a pass over digits costs what it costs.
    if work.rows >= 256:
        return False
    rounds = (math.ceil(work.size / (group * EACH)) - 1).bit_length()
    return (4 if element == 4 else 2) * 3 <= 2 * (1 + rounds) + 2


def _by_blocks(work: Work, group: int) -> None:
    last = work.dim == work.given.dim() - 1
    single = work.size <= group * EACH and (last or work.count > 0)
    source = work.rows_of(last=last or single)
    strides = i64(source.stride(1), source.stride(0)) if source.dim() == 2 else i64(1, work.size)
    if single:
        kind = "sort_block_topk" if work.count else "sort_block"
        suffix = "_stable" if work.stable and not work.count else ""
        bound = {"inp": source, "out_vals": work.values, "out_idx": work.indices, **work.selected}
        bound |= {"size": i32(work.size), "strides": strides, "desc": u8(work.descending)}
        name = f"{kind}_{metal(source.dtype)}_tptg{group}{suffix}"
        kernels[name].launch(bound, groups=(1, work.rows, 1), group=group)
        return
    _merged(work, source, strides, group)


def _merged(work: Work, source: Tensor, strides: bytes, group: int) -> None:
    """Blocks sorted, then merged two by two; float32 as integers of the same order where that ends in the output."""
    blocks = math.ceil(work.size / (group * EACH))
    # A single rank has its row's number as its place in the output, whatever the dimension.
    direct = work.dim == work.given.dim() - 1 or work.count == 1
    name, short = metal(source.dtype), "_u16" if direct and work.size <= 1 << 16 else ""
    # Integers are compared without a branch for NaN; the kernel that writes the output makes floats of them again.
    keyed = source.dtype == torch.float32 and direct and blocks > 1
    key = torch.int32 if keyed else source.dtype
    pairs = [work.scratch(key, torch.int16 if short else torch.int32) for _ in range(2 if blocks > 1 else 1)]
    stable = "_stable" if work.stable and not keyed else ""
    block = f"mb_sort_block_fkey_{name}_tptg{group}{short}" if keyed else f"mb_sort_block_{name}_tptg{group}{short}"
    grid = (blocks, work.rows, 1)
    bound = {"inp": source, "dv": pairs[0][0], "di": pairs[0][1], "size": i32(work.size), "strides": strides}
    kernels[block + stable].launch({**bound, "desc": u8(work.descending)}, groups=grid, group=group)
    at, tiles = 0, 2
    while tiles // 2 < blocks:
        last = direct and tiles >= blocks
        into = (work.values, work.indices) if last else pairs[1 - at]
        bound = {"vi": pairs[at][0], "ii": pairs[at][1], "vo": into[0], "io": into[1]}
        bound |= {"dims": i32(work.size, tiles, blocks, 0), "desc": u8(work.descending if last or not keyed else 0)}
        merge = f"mb_merge_{'uint' if keyed else name}"
        if last:
            bound |= work.selected
            merge = f"mb_merge_final{'_topk' if work.count else ''}{'_fkey' if keyed else ''}_{name}"
        kernels[f"{merge}_tptg{group}{short}"].launch(bound, groups=grid, group=group)
        at, tiles = 1 - at, tiles * 2
    if not direct or blocks == 1:
        work.finish(*pairs[at])


@dataclass(frozen=True)
class Work:
    """A sort of `given` along `dim` into `values` and `indices`: all ranks, or the first `count`."""

    given: Tensor
    values: Tensor
    indices: Tensor
    dim: int
    descending: bool
    stable: bool
    count: int = 0

    @property
    def size(self) -> int:
        """Elements of a row."""
        return int(self.given.shape[self.dim])

    @property
    def rows(self) -> int:
        """Rows to sort."""
        return self.given.numel() // self.size

    @property
    def selected(self) -> dict[str, bytes]:
        """The binding that says which ranks a kernel writes, where these are not all."""
        return {"sel": i32(0, self.count)} if self.count else {}

    def dense(self) -> Work:
        """This, or the same into contiguous tensors that are still to be copied."""
        if self.values.is_contiguous() and self.indices.is_contiguous():
            return self
        values, indices = (each.new_empty(each.shape) for each in (self.values, self.indices))
        return replace(self, values=values, indices=indices)

    def rows_of(self, *, last: bool) -> Tensor:
        """Return the rows as a matrix, in place where strides allow; else a contiguous copy with the dimension last."""
        if not last:
            return self.given.movedim(self.dim, -1).contiguous().view(self.rows, self.size)
        source = self.given if self.dim == self.given.dim() - 1 else self.given.movedim(self.dim, -1).contiguous()
        try:
            return source.view(self.rows, self.size)
        except RuntimeError:
            return source.contiguous().view(self.rows, self.size)

    def scratch(self, values: torch.dtype, indices: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return room for every row's values and places between two launches."""
        shape = (self.rows, self.size)
        return self.given.new_empty(shape, dtype=values), self.given.new_empty(shape, dtype=indices)

    def finish(self, values: Tensor, indices: Tensor) -> None:
        """Copy sorted rows to the outputs, their dimension where it was."""
        shape = [*self.given.movedim(self.dim, -1).shape]
        self.values.copy_(values.view(shape).movedim(-1, self.dim))
        self.indices.copy_(indices.view(shape).movedim(-1, self.dim))


def by_digits(work: Work) -> None:
    """Sort rows of elements of 4 bytes or less, the last pass into the output where a row is contiguous in it."""
    element = work.given.element_size()
    # Digits of 8 bits halve the traffic of 4; bytes keep 4, as two passes are the fewest that the kernels make.
    bits = 4 if element == 1 else 8
    # Half the threads of a threadgroup, and so half its memory: two fit a core then (small_tg).
    narrow = element == 2 and work.rows >= 32
    group = 1024 if element == 2 and not narrow else 512
    blocks = math.ceil(work.size / (group * (8 if element == 1 else 4)))
    direct = work.dim == work.given.dim() - 1 or work.count == 1
    # Half the traffic: kernels read these int16 tensors as ushort, which holds every place of such a row.
    short = direct and work.size <= 1 << 16
    counted = blocks <= 4 and not narrow
    fused = not counted and blocks <= 4 and blocks * blocks * work.rows <= 128
    tail = f"{metal(work.given.dtype)}_{bits}bit{'_tptg512' if narrow else ''}"
    scatter = f"radix_scatter_{'fused_' if fused else ''}"
    suffix = "_u16" if short else ""
    pairs = [work.scratch(work.given.dtype, torch.int16 if short else torch.int32) for _ in range(2)]
    entries = blocks << bits
    histograms = torch.empty((work.rows, entries), dtype=torch.int32, device=work.given.device)
    keys, at = work.rows_of(last=False), 0
    grid, passes = (blocks, work.rows, 1), 8 * element // bits
    for each in range(passes):
        dims = i32(work.size, blocks, each * bits, 0)
        count = {"input": keys, "histograms": histograms, "dims": dims, "desc": u8(work.descending)}
        if counted:
            kernels[f"radix_count_scan_{tail}_mb4"].launch(count, groups=(1, work.rows, 1), group=group)
        else:
            kernels[f"radix_count_{tail}"].launch(count, groups=grid, group=group)
            if not fused:
                entry = {"histograms": histograms, "n_entries": i32(entries)}
                kernels["radix_scan"].launch(entry, groups=(1, work.rows, 1), group=1024)
        final = direct and each == passes - 1
        into = (work.values, work.indices) if final else pairs[1 - at]
        selected = "_topk" if work.count else ""
        bound: dict[str, Any] = {"keys_in": keys, "vals_in": pairs[at][1], "keys_out": into[0], "vals_out": into[1]}
        bound |= {"offsets": histograms, "dims": dims, "flags": u8(work.descending, each == 0)}
        bound |= work.selected if final else {}
        name = f"{scatter}final{selected}_{tail}{suffix}" if final else f"{scatter}{tail}{suffix}"
        kernels[name].launch(bound, groups=grid, group=group)
        at = 1 - at
        keys = pairs[at][0]
    if not direct:
        work.finish(*pairs[at])
