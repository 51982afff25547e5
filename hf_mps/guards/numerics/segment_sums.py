"""Sums of rows that share a key, added in one order, always: no two threads add to the same place.

The order is decided on the CPU, from the keys alone. The device then adds rows in pairs, their sums in pairs, and so
on: as many additions in all as there are rows, in as many steps as the largest sum needs to be halved.
"""

from __future__ import annotations

from typing import Any


def add_rows(target: Any, keys: Any, terms: Any, *, anew: bool = False) -> None:
    """Add row i of `terms` to row `keys[i]` of `target`, in place; `anew`: in place of what was there.

    `target` is (rows, width) and contiguous, `terms` (n, width), both on one device and floating point; `keys` (n,)
    int64 on the CPU, each a row of `target`. Half precision is added up in float32. Waits once, to move its order.
    """
    import torch

    if keys.numel() == 0 or terms.shape[1] == 0:
        return
    half = terms.dtype in (torch.float16, torch.bfloat16)
    order = keys.argsort(stable=True)
    rows, counts = torch.unique_consecutive(keys[order], return_counts=True)
    levels = _levels(counts, order)
    parts = [rows, *(part for level in levels for part in level)] if levels else [rows, order]
    together: Any = torch.cat(parts).to(target.device)
    target_rows, *moved = together.split([part.numel() for part in parts])
    sums = terms.float() if half else terms
    if not levels:
        sums = sums.index_select(0, moved.pop())
    for left, right in zip(moved[::2], moved[1::2], strict=True):
        sums = torch.cat([sums, sums.new_zeros(1, sums.shape[1])])
        sums = sums.index_select(0, left) + sums.index_select(0, right)
    if not anew:
        sums = sums + target.index_select(0, target_rows)
    # Each row is written once: nothing races.
    target.scatter_(0, target_rows[:, None].expand_as(sums), sums.to(target.dtype))


def _levels(counts: Any, order: Any) -> list[tuple[Any, Any]]:
    """For each halving the rows that are added to one another, as (left, right); the row past the last is zero.

    `counts` says how many rows each sum has, `order` where they lie before the first halving.
    """
    import torch

    levels: list[tuple[Any, Any]] = []
    while int(counts.max()) > 1:
        total = int(counts.sum())
        first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        place = torch.arange(total) - first
        left = torch.nonzero(place % 2 == 0).view(-1)
        alone = place[left] + 1 == torch.repeat_interleave(counts, counts)[left]
        right = torch.where(alone, total, left + 1)
        if not levels:
            order = torch.cat([order, torch.tensor([total])])
            left, right = order[left], order[right]
        levels.append((left, right))
        counts = (counts + 1) // 2
    return levels
