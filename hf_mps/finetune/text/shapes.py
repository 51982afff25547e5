"""The short list of lengths that wastes least padding: dynamic programming over the histogram of the rows' lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# Above so many candidates they are taken further apart: the search grows with their square.
CANDIDATES = 256
# Once a list is within this share of what the longest one costs, further lengths are not worth their shapes.
WORTH = 0.01


@dataclass(frozen=True)
class Shapes:
    """`lengths` in ascending order, in tokens; `waste` is the share of padding expected in a batch, 0 to 1."""

    lengths: tuple[int, ...]
    waste: float
    below: tuple[float, ...] = field(repr=False)
    """The share of rows with at most N tokens, for N from 0."""

    def unlisted(self, batch: int) -> float:
        """The expected length of a batch of `batch` random rows that is padded to its own longest row."""
        return sum(1 - share**batch for share in self.below)


def best(counts: Sequence[int], *, top: int, limit: int, batch: int, most: int, step: int) -> Shapes:
    """The list of at most `most` lengths under which batches of `batch` random rows hold least padding.

    `counts` are the rows' lengths (at least one), `top` the longest that the list must hold; `batch` 1 stands for
    batches of rows of like length. Lengths are multiples of `step`; the last is `top` rounded up, or `limit` where that
    is less. The shortest list is taken that costs at most WORTH more than the longest.

    A batch is as long as its longest row, which is within L with probability F(L)**batch where F(L) is the share of
    rows within L. So each length of the list costs itself times the probability that it is the next one up, a sum over
    neighbours, which dynamic programming makes least exactly.
    """
    below = _below(counts, top)
    candidates = _candidates(top, max(limit, top), step)
    within = [below[min(length, top)] ** batch for length in candidates]
    mean = sum(counts) / len(counts)
    found = [(cost, lengths) for cost, lengths in _lists(candidates, within, min(most, len(candidates)))]
    least = found[-1][0]
    cost, lengths = next((cost, lengths) for cost, lengths in found if cost <= least * (1 + WORTH))
    return Shapes(lengths, 1 - mean / cost, tuple(below))


def _below(counts: Sequence[int], top: int) -> list[float]:
    histogram = [0] * (top + 1)
    for count in counts:
        histogram[count] += 1
    shares, so_far = [], 0
    for number in histogram:
        so_far += number
        shares.append(so_far / len(counts))
    return shares


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
