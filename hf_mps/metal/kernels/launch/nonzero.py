"""Where a tensor is not zero, and what masks take and give by it."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.fill import expanded
from hf_mps.metal.kernels.launch.iterator import LARGEST_GROUP
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i32, i64, u32, u64

SOURCE = "operations/Indexing.mm"


@rule("nonzero", source=SOURCE)
def nonzero(release: Release, self: Tensor) -> Tensor:
    """Counts of groups and their running sums, for whose last the host waits; then each element to its place."""
    if self.numel() == 0:
        return torch.empty((0, self.dim()), dtype=torch.int64, device=self.device)
    if self.numel() >= 2**31 - 1:
        raise NoRule("PyTorch refuses that many elements")
    given = self.contiguous()
    count = given.numel()
    group = min(LARGEST_GROUP, count)
    blocks = -(-count // group)
    parts = _parts(release, given, group, blocks)
    shape = (int(parts.total.item()), self.dim())
    output = torch.empty(shape, dtype=torch.int64, device=self.device)
    if output.numel():
        parts.place(release, given, output, group)
    return output


@rule("nonzero_static", source=SOURCE)
def nonzero_static(release: Release, self: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
    """As many as are asked for, in which the host waits for nothing; what is left holds the filling."""
    if size < 0 or self.numel() >= 2**31 - 1:
        raise NoRule("PyTorch refuses the arguments")
    output = torch.empty((size, self.dim()), dtype=torch.int64, device=self.device)
    if output.numel() == 0:
        return output
    output.fill_(fill_value)
    if self.numel():
        given = self.contiguous()
        group = min(LARGEST_GROUP, given.numel())
        _parts(release, given, group, -(-given.numel() // group)).place(release, given, output, group)
    return output


@rule("nonzero.out", source=SOURCE)
def nonzero_into(release: Release, self: Tensor, *, out: Tensor) -> Tensor:
    """Into a tensor that takes the result's shape."""
    if out.dtype != torch.int64:
        raise NoRule("PyTorch refuses the output's dtype")
    found = self.nonzero()
    return out.resize_(found.shape).copy_(found)


@rule("masked_select", source=SOURCE)
def masked_select(release: Release, self: Tensor, mask: Tensor) -> Tensor:
    """Mask and tensor broadcast, and the mask becomes indices."""
    if mask.dtype != torch.bool or not mask.is_mps:
        raise NoRule("PyTorch refuses the mask")
    try:
        shape = torch.broadcast_shapes(self.shape, mask.shape) or (1,)  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise NoRule("PyTorch refuses the shapes") from None
    return self.expand(shape)[mask.expand(shape)]


@rule("masked_scatter_", source=SOURCE)
def masked_scatter(release: Release, self: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """The source's elements, one after another, where the mask says."""
    if self.dtype != source.dtype or mask.dtype != torch.bool or self.dim() == 0 or not source.is_mps:
        raise NoRule("no dimensions, or what PyTorch refuses")
    where = expanded(mask, self).nonzero().unbind(1)
    if where[0].numel() > source.numel():
        raise NoRule("PyTorch refuses the source: it has too few elements")
    if where[0].numel():
        self.index_put_(where, source.flatten()[: where[0].numel()])
    return self


class _Counted:
    """The running sums of a release whose kernels keep the sums within a group, too."""

    def __init__(self, given: Tensor, blocks: int) -> None:
        self.prefix, self.sums, self.offsets, self.total = (
            torch.empty(size, dtype=torch.int32, device=given.device) for size in (given.numel(), blocks, blocks, 1)
        )

    def count(self, release: Release, given: Tensor, group: int) -> None:
        arguments = {"input": given, "prefix": self.prefix, "block_sums": self.sums}
        kernel = release.kernel(f"count_nonzero_prefix_sum_{metal(given.dtype)}")
        kernel.launch(arguments, given.numel(), group)

    def place(self, release: Release, given: Tensor, output: Tensor, group: int) -> None:
        arguments = {"input": given, "prefix": self.prefix, "output": output, "ndim": i32(output.shape[1])}
        arguments |= {"sizes": i64(given.shape), "block_offsets": self.offsets, "max_entries": i32(len(output))}
        kernel = release.kernel(f"scatter_nonzero_indices_{metal(given.dtype)}")
        kernel.launch(arguments, given.numel(), group)


class _CountedAgain:
    """Those of 2.14 and later, whose kernels count within a group again, for tensors of more than 2**32 elements."""

    def __init__(self, given: Tensor, blocks: int) -> None:
        self.sums = torch.empty(blocks, dtype=torch.int32, device=given.device)
        self.offsets, self.total = (torch.empty(size, dtype=torch.int64, device=given.device) for size in (blocks, 1))

    def count(self, release: Release, given: Tensor, group: int) -> None:
        arguments = {"input": given, "block_sums": self.sums, "flat_base": u64(0), "block_base": u32(0)}
        kernel = release.kernel(f"count_nonzero_prefix_sum_{metal(given.dtype)}_uint")
        kernel.launch(arguments, given.numel(), group)

    def place(self, release: Release, given: Tensor, output: Tensor, group: int) -> None:
        arguments = {"input": given, "output": output, "ndim": i32(output.shape[1]), "sizes": i64(given.shape)}
        arguments |= {"block_offsets": self.offsets, "max_entries": i64(len(output))}
        kernel = release.kernel(f"scatter_nonzero_indices_{metal(given.dtype)}_uint")
        kernel.launch(arguments | {"flat_base": u64(0), "block_base": u32(0)}, given.numel(), group)


def _parts(release: Release, given: Tensor, group: int, blocks: int) -> _Counted | _CountedAgain:
    name = "prefix_sum_blocks"
    parts: _Counted | _CountedAgain = _Counted(given, blocks)
    if name not in release:
        name, parts = f"{name}_uint", _CountedAgain(given, blocks)
    sums = release.kernel(name)
    parts.count(release, given, group)
    threads = min(LARGEST_GROUP, -(-blocks // 32) * 32)
    arguments = {"block_sums": parts.sums, "block_offsets": parts.offsets, "total_nonzero": parts.total}
    sums.launch(arguments | {"num_blocks": u32(blocks)}, threads, threads)
    return parts
