"""The short list of lengths that wastes least padding: dynamic programming over the histogram of the rows' lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import comb

# Above so many candidates they are taken further apart: the search grows with their square.
CANDIDATES = 256
# Once a list is within this share of what the longest one costs, further lengths are not worth their shapes.
WORTH = 0.01


def best(counts: Sequence[int], *, top: int, limit: int, batch: int, most: int, step: int) -> tuple[int, ...]:
    """The ascending list of at most `most` lengths under which batches of `batch` random rows hold least padding.

    `counts` are the rows' lengths (at least one), `top` the longest that the list must hold; `batch` 1 stands for
    batches of rows of like length. Lengths are multiples of `step`; the last is `top` rounded up, or `limit` where that
    is less. The shortest list is taken that costs at most WORTH more than the longest. Where a batch's longest row can
    be of no more lengths than the list has, those are the list.

    Each length of the list costs itself times the probability that it is the next one up from a batch's longest row, a
    sum over neighbours, which dynamic programming makes least exactly.
    """
    within = _within(counts, top, min(batch, len(counts)))
    candidates = _candidates(top, max(limit, top), step)
    found = list(_lists(candidates, [within[min(length, top)] for length in candidates], min(most, len(candidates))))
    least = found[-1][0]
    listed = next(lengths for cost, lengths in found if cost <= least * (1 + WORTH))
    exact = {top, *(length for length, _ in longest(counts, min(batch, len(counts))))}
    return tuple(sorted(exact)) if len(exact) <= len(listed) else listed


def longest(counts: Sequence[int], size: int) -> Iterator[tuple[int, float]]:
    """Each length that the longest of `size` different random rows can have, with its probability."""
    within = _within(counts, max(counts), size)
    for length, (before, share) in enumerate(zip([0.0, *within[:-1]], within, strict=True)):
        if share > before:
            yield length, share - before


def _within(counts: Sequence[int], top: int, size: int) -> list[float]:
    """The probability that the longest of `size` different random rows is within N, for N from 0 to `top`.

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


def _lists(candidates: Sequence[int], within: Sequence[float], most: int) -> list[tuple[float, tuple[int, ...]]]:
    """For 1, 2, … `most` lengths: the least expected length of a batch, and the list; the last candidate is in each."""
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
    found = []
    for number in range(most):
        chain, at = [], last
        for level in range(number, -1, -1):
            chain.append(candidates[at])
            at = before[level][at]
        found.append((costs[number][last], tuple(reversed(chain))))
    return found
