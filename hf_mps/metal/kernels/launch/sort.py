"""Sorting, the k largest and the k-th smallest: blocks merged, or digits counted, with all or some ranks written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import refuse_misfit, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i32, i64, u8

SOURCE = "operations/Sort.mm"
REFUSED = "PyTorch refuses the arguments"
EACH = 4
"""Elements that a thread sorts (ILP_PER_THREAD)."""
Pair = tuple[Tensor, Tensor]


@rule("sort.stable", "sort.values_stable", source=SOURCE)
def sort(
    release: Release,
    given: Tensor,
    *,
    stable: bool | None,
    dim: int = -1,
    descending: bool = False,
    values: Tensor | None = None,
    indices: Tensor | None = None,
) -> Pair:
    """Without `stable` equal elements come in the order that the blocks' merge leaves."""
    rank = max(given.dim(), 1)
    if not -rank <= dim < rank:
        raise NoRule(REFUSED)
    if values is None or indices is None:
        values = torch.empty_like(given)
        indices = torch.empty_like(values, dtype=torch.int64)
    else:
        _fit(values, given.shape, given.dtype)
        _fit(indices, given.shape, torch.int64)
    _sorted(Work(release, given, values, indices, dim % rank, descending, bool(stable)))
    return values, indices


@rule("topk", "topk.values", source=SOURCE)
def topk(
    release: Release,
    given: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    ordered: bool = True,
    *,
    values: Tensor | None = None,
    indices: Tensor | None = None,
) -> Pair:
    """The first k of a sort, in order whether that is asked for or not."""
    rank = max(given.dim(), 1)
    if not -rank <= dim < rank or not 0 <= k <= (given.shape[dim] if given.dim() else 1):
        raise NoRule(REFUSED)
    dim %= rank
    shape = [k if at == dim else size for at, size in enumerate(given.shape)]
    if values is None or indices is None:
        values, indices = given.new_empty(shape), given.new_empty(shape, dtype=torch.int64)
    else:
        _fit(values, shape, given.dtype)
        _fit(indices, shape, torch.int64)
    if not given.numel() or not k:
        return values, indices
    if dim == rank - 1:
        _sorted(Work(release, given, values, indices, dim, largest, False, 0, k))
        return values, indices
    source = given.movedim(dim, -1).contiguous()
    shape = [*source.shape[:-1], k]
    found = given.new_empty(shape), given.new_empty(shape, dtype=torch.int64)
    _sorted(Work(release, source, *found, rank - 1, largest, False, 0, k))
    values.copy_(found[0].movedim(-1, dim))
    indices.copy_(found[1].movedim(-1, dim))
    return values, indices


@rule("kthvalue.values", source=SOURCE)
def kthvalue(
    release: Release, given: Tensor, k: int, dim: int = -1, keepdim: bool = False, *, values: Tensor, indices: Tensor
) -> Pair:
    """The rank k - 1 of a sort; results are made anew and become what was given for them."""
    rank = max(given.dim(), 1)
    if not -rank <= dim < rank or given.dtype == torch.bool or given.is_complex():
        raise NoRule(REFUSED)
    dim %= rank
    if not 1 <= k <= (given.shape[dim] if given.dim() else 1):
        raise NoRule(REFUSED)
    shape = [1 if at == dim else size for at, size in enumerate(given.shape)]
    final = shape if keepdim else [size for at, size in enumerate(given.shape) if at != dim]
    if values.dtype != given.dtype or indices.dtype != torch.int64:
        raise NoRule(REFUSED)
    found = given.new_empty(shape), given.new_empty(shape, dtype=torch.int64)
    if given.numel():
        _sorted(Work(release, given, *found, dim, False, False, k - 1, 1))
    for target, made in zip((values, indices), found, strict=True):
        target.resize_(final).copy_(made.view(final))
    return values, indices


def _fit(target: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Resize an empty tensor that is written, as PyTorch does; refuse another of another shape or dtype."""
    refuse_misfit(target, shape if target.numel() else target.shape, dtype)
    target.resize_(shape)


def _sorted(work: Work) -> None:
    """sort_out_mps_impl: digits for few rows of small elements, else one block a row, else blocks that are merged."""
    given = work.given
    if f"sort_block_{metal(given.dtype)}_tptg32" not in work.release:
        raise NoRule("MPSGraph on this release" if "radix_scan" not in work.release else f"no kernel for {given.dtype}")
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
    """Threads of a threadgroup (select_tptg): a power of two, fewer for few rows so that several share one."""
    wanted = math.ceil(size / EACH)
    if rows <= 2 and size > 2048:
        wanted = min(wanted, max(2048, math.ceil(size / max(1, 4 // rows))) // EACH)
    group = min(max(1 << (max(wanted, 1) - 1).bit_length(), 32), 1024)
    return min(group, 512 if rows <= 256 else 256) if element > 4 else group


def _digits(work: Work, group: int) -> bool:
    """Whether counting digits needs no more launches than merging (should_use_radix)."""
    element = work.given.element_size()
    if element > 4:
        return False
    if work.given.is_floating_point() and element == 2 and work.size >= 2048:
        return True
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
        bound = {
            "inp": source,
            "out_vals": work.values,
            "out_idx": work.indices,
            "size": i32(work.size),
            "strides": strides,
            "desc": u8(work.descending),
        }
        if work.count:
            bound["sel"] = i32(work.offset, work.count)
        work.release.kernel(f"{kind}_{metal(source.dtype)}_tptg{group}{suffix}").launch(
            bound, groups=(1, work.rows, 1), group=group
        )
        return
    _merged(work, source, strides, group)


def _merged(work: Work, source: Tensor, strides: bytes, group: int) -> None:
    """Blocks sorted, then merged two by two; float32 as integers of the same order where that ends in the output."""
    blocks = math.ceil(work.size / (group * EACH))
    direct = work.dim == work.given.dim() - 1 or work.count == 1
    name, short = metal(source.dtype), "_u16" if direct and work.size <= 1 << 16 else ""
    keyed = source.dtype == torch.float32 and direct and blocks > 1
    key = torch.int32 if keyed else source.dtype
    pairs = [work.scratch(key, torch.int16 if short else torch.int32) for _ in range(2 if blocks > 1 else 1)]
    stable = "_stable" if work.stable and not keyed else ""
    block = f"mb_sort_block_fkey_{name}_tptg{group}{short}" if keyed else f"mb_sort_block_{name}_tptg{group}{short}"
    grid = (blocks, work.rows, 1)
    work.release.kernel(block + stable).launch(
        {
            "inp": source,
            "dv": pairs[0][0],
            "di": pairs[0][1],
            "size": i32(work.size),
            "strides": strides,
            "desc": u8(work.descending),
        },
        groups=grid,
        group=group,
    )
    at, tiles = 0, 2
    while tiles // 2 < blocks:
        last = direct and tiles >= blocks
        into = (work.values, work.indices) if last else pairs[1 - at]
        selected = "_topk" if last and work.count else ""
        merge = (
            f"mb_merge_final{selected}{'_fkey' if keyed else ''}_{name}"
            if last
            else f"mb_merge_{'uint' if keyed else name}"
        )
        bound = {
            "vi": pairs[at][0],
            "ii": pairs[at][1],
            "vo": into[0],
            "io": into[1],
            "dims": i32(work.size, tiles, blocks, 0),
            "desc": u8(work.descending if last or not keyed else 0),
        }
        if selected:
            bound["sel"] = i32(work.offset, work.count)
        work.release.kernel(f"{merge}_tptg{group}{short}").launch(bound, groups=grid, group=group)
        at, tiles = 1 - at, tiles * 2
    if not direct or blocks == 1:
        work.finish(*pairs[at])


@dataclass(frozen=True)
class Work:
    """A sort of `given` along `dim` into `values` and `indices`: all ranks, or `count` of them from `offset` on."""

    release: Release
    given: Tensor
    values: Tensor
    indices: Tensor
    dim: int
    descending: bool
    stable: bool
    offset: int = 0
    count: int = 0

    @property
    def size(self) -> int:
        """Elements of a row."""
        return int(self.given.shape[self.dim])

    @property
    def rows(self) -> int:
        """Rows to sort."""
        return self.given.numel() // self.size

    def dense(self) -> Work:
        """This, or the same into contiguous tensors that are still to be copied."""
        if self.values.is_contiguous() and self.indices.is_contiguous():
            return self
        shape = self.values.shape
        return replace(
            self,
            values=torch.empty(shape, dtype=self.values.dtype, device=self.values.device),
            indices=torch.empty(shape, dtype=torch.int64, device=self.values.device),
        )

    def rows_of(self, *, last: bool) -> Tensor:
        """The rows as a matrix, in place where strides allow; else a contiguous copy with the dimension last."""
        if not last:
            return self.given.movedim(self.dim, -1).contiguous().view(self.rows, self.size)
        source = self.given if self.dim == self.given.dim() - 1 else self.given.movedim(self.dim, -1).contiguous()
        try:
            return source.view(self.rows, self.size)
        except RuntimeError:
            return source.contiguous().view(self.rows, self.size)

    def scratch(self, values: torch.dtype, indices: torch.dtype) -> tuple[Tensor, Tensor]:
        """Room for every row's values and places between two launches."""
        device = self.given.device
        shape = (self.rows, self.size)
        return torch.empty(shape, dtype=values, device=device), torch.empty(shape, dtype=indices, device=device)

    def finish(self, values: Tensor, indices: Tensor) -> None:
        """Copy sorted rows to the outputs, their dimension where it was."""
        shape = [*self.given.movedim(self.dim, -1).shape]
        self.values.copy_(values.view(shape).movedim(-1, self.dim))
        self.indices.copy_(indices.view(shape).movedim(-1, self.dim))


def by_digits(work: Work) -> None:
    """Sort rows of elements of 4 bytes or less, the last pass into the output where a row lies side by side in it."""
    element = work.given.element_size()
    bits = 4 if element == 1 else 8
    narrow = element == 2 and work.rows >= 32
    group = 1024 if element == 2 and not narrow else 512
    blocks = math.ceil(work.size / (group * (8 if element == 1 else 4)))
    direct = work.dim == work.given.dim() - 1 or work.count == 1
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
    release, grid, passes = work.release, (blocks, work.rows, 1), 8 * element // bits
    for each in range(passes):
        dims = i32(work.size, blocks, each * bits, 0)
        count = {"input": keys, "histograms": histograms, "dims": dims, "desc": u8(work.descending)}
        if counted:
            release.kernel(f"radix_count_scan_{tail}_mb4").launch(count, groups=(1, work.rows, 1), group=group)
        else:
            release.kernel(f"radix_count_{tail}").launch(count, groups=grid, group=group)
            if not fused:
                release.kernel("radix_scan").launch(
                    {"histograms": histograms, "n_entries": i32(entries)}, groups=(1, work.rows, 1), group=1024
                )
        final = direct and each == passes - 1
        into = (work.values, work.indices) if final else pairs[1 - at]
        selected = "_topk" if work.count else ""
        bound = {
            "keys_in": keys,
            "vals_in": pairs[at][1],
            "keys_out": into[0],
            "vals_out": into[1],
            "offsets": histograms,
            "dims": dims,
            "flags": u8(work.descending, each == 0),
        }
        if final and work.count:
            bound["sel"] = i32(work.offset, work.count)
        name = f"{scatter}final{selected}_{tail}{suffix}" if final else f"{scatter}{tail}{suffix}"
        release.kernel(name).launch(bound, groups=grid, group=group)
        at = 1 - at
        keys = pairs[at][0]
    if not direct:
        work.finish(*pairs[at])
