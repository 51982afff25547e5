"""The short list of lengths that wastes least padding: dynamic programming over the histogram of the rows' lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import comb

# More candidates are thinned out: the search grows with their square.
CANDIDATES = 256
# A list within this share of the longest list's cost is good enough: each further length is a shape more.
TOLERANCE = 0.01


def optimal_buckets(
    counts: Sequence[int], *, top: int, limit: int, batch: int, most: int, step: int
) -> tuple[int, ...]:
    """Return the ascending list of at most `most` lengths that gives batches of `batch` random rows least padding.

    `counts` are the rows' lengths (at least one), `top` the longest that the list must hold; `batch` 1 stands for
    batches of rows of like length. Lengths are multiples of `step`; the last is `top` rounded up, or `limit` where that
    is less. The shortest list wins that costs at most TOLERANCE more than the longest. Where a batch's longest row
    takes no more lengths than the list has, those lengths are the list.

    Each length costs itself times the probability that it is the next one up from a batch's longest row: a sum over
    neighbours, which dynamic programming minimises exactly.
    """
    within = _maximum_within(counts, top, min(batch, len(counts)))
    candidates = _candidates(top, max(limit, top), step)
    shares = [within[min(length, top)] for length in candidates]
    lists = list(_optimal_lists(candidates, shares, min(most, len(candidates))))
    least = lists[-1][0]
    listed = next(lengths for cost, lengths in lists if cost <= least * (1 + TOLERANCE))
    exact = {top, *(length for length, _ in batch_maxima(counts, min(batch, len(counts))))}
    return tuple(sorted(exact)) if len(exact) <= len(listed) else listed


def batch_maxima(counts: Sequence[int], size: int) -> Iterator[tuple[int, float]]:
    """Yield each length that the longest of `size` different random rows can have, with its probability."""
    within = _maximum_within(counts, max(counts), size)
    for length, (before, share) in enumerate(zip([0.0, *within[:-1]], within, strict=True)):
        if share > before:
            yield length, share - before


def _maximum_within(counts: Sequence[int], top: int, size: int) -> list[float]:
    """Return, for N from 0 to `top`, the probability that the longest of `size` different random rows is at most N.

    With k of n rows within N it is C(k, size) / C(n, size).
    """
    histogram = [0] * (top + 1)
    for count in counts:
        histogram[count] += 1
    every = comb(len(counts), size)
    return [comb(below, size) / every for below in accumulate(histogram)]


def _candidates(top: int, limit: int, step: int) -> list[int]:
    step *= -(-top // (step * CANDIDATES))
    lengths = range(step, top + step, step)
    return [min(length, limit) for length in lengths]


def _optimal_lists(
    candidates: Sequence[int], within: Sequence[float], most: int
) -> list[tuple[float, tuple[int, ...]]]:
    """Return (least expected length of a batch, list) for 1, 2, … `most` lengths; each list has the last candidate."""
    last = len(candidates) - 1
    costs = [[length * share for length, share in zip(candidates, within, strict=True)]]
    before: list[list[int]] = [[-1] * len(candidates)]
    for _ in range(most - 1):
        row, came = [], []
        for end, length in enumerate(candidates):
            options = [(costs[-1][start] + length * (within[end] - within[start]), start) for start in range(end)]
            cost, start = min(options, default=(float("inf"), -1))
            row.append(cost)
            came.append(start)
        costs.append(row)
        before.append(came)
    lists = []
    for number in range(most):
        chain, at = [], last
        for level in range(number, -1, -1):
            chain.append(candidates[at])
            at = before[level][at]
        lists.append((costs[number][last], tuple(reversed(chain))))
    return lists
