"""Length bucketing: rows of like length, drawn at random, share a batch, so that little of it is padding; and the
short list of lengths that wastes least, by dynamic programming over the histogram of the rows' lengths.

Models learn from them as from random batches: MRPC over 50 seeds, F1 0.8598 against 0.8581, the stock Trainer 0.8587,
a standard error of 0.2 points between any two (scripts/bench/compare_stock.py --device cuda;
`training.train_sampling_strategy=random`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from math import comb
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.distributed.world import World

if TYPE_CHECKING:
    from hf_mps.finetune.recipe.schema import Recipe
    from hf_mps.finetune.tasks import Prepared

BUCKETED = "like length together"
RANDOM = "random"
KEY = "train_sampling_strategy"
# With fewer batches in an epoch a bucket has too few rows for its batches to be random.
MIN_BATCHES = 8
# Lengths within one step share a bucket where batches are padded to their own longest row: of MRPC's tokens in batches
# of 32 1.5 % is padding then, with steps of 8 7.0 %, by group_by_length 3.2 % (scripts/bench/bench_padding.py).
STEP = 2
# More candidates are thinned out: the search grows with their square.
CANDIDATES = 256
# A list within this share of the longest list's cost is good enough: each further length is a shape more.
TOLERANCE = 0.01
Listed = tuple[int, ...]
"""Lengths that batches are padded to, in ascending order."""


def decide(recipe: Recipe, counts: Sequence[int] | None, batch: int) -> Choice[str]:
    """Choose how batches of `batch` rows are drawn, from the rows' lengths `counts` (None: rows have no length).

    Where several processes train, `batch` is one's, and the batches of a step are drawn together.
    The recipe's `training.train_sampling_strategy` wins.
    """
    if strategy := recipe.training.get(KEY):
        return Choice(strategy, "the recipe says so")
    if not recipe.optimizations:
        return Choice(RANDOM, "optimizations is false in the recipe")
    if getattr(recipe, "padding", None) == "max_length":
        return Choice(RANDOM, "every batch is padded to one length")
    if not counts or min(counts) == max(counts):
        return Choice(RANDOM, "every row is of one length")
    if len(counts) < MIN_BATCHES * batch * World.here().size:
        return Choice(RANDOM, f"{len(counts)} rows are too few to draw batches of one length from")
    return Choice(BUCKETED, "a batch holds rows of one length of the list, drawn at random: less padding")


def grouped(choice: Choice[str]) -> bool:
    """Return whether this choice puts rows of like length into a batch."""
    return choice.value in (BUCKETED, "group_by_length")


def padded_tokens(counts: Sequence[int], batch: int, target: Callable[[int], int], *, alike: bool) -> float:
    """Return the tokens of an epoch's batches, padding included: exact for `alike` batches, expected for random ones.

    `counts` are the rows' lengths, `batch` the rows in a batch, which is padded to `target(its longest row)`.
    """
    if alike:
        full, rest = full_batches([bucket(target(count)) for count in counts], range(len(counts)), batch)
        return sum(len(rows) * target(max(counts[row] for row in rows)) for rows in (*full, rest) if rows)
    whole, last = divmod(len(counts), batch)
    return sum(
        number * size * sum(share * target(length) for length, share in batch_maxima(counts, size))
        for number, size in ((whole, batch), (1, last))
        if number and size
    )


def install_sampler(trainer: Any, prepared: Prepared, drawn: int | None = None) -> None:
    """Let `trainer` draw each training batch from rows that are padded to one length.

    The lengths are `prepared.token_counts`. Where several processes train, each draws the same rows in the same order
    and takes one batch of every `world_size` (accelerate's BatchSamplerShard): the batches of a step are of one length,
    so that no process waits for another's longer one. `drawn` rows of a length are drawn at a time, by default one
    batch for each process.
    """
    length = prepared.choices["lengths"].value if "lengths" in prepared.choices else None
    target: Callable[[int], int] = getattr(length, "target", int)
    keys = [bucket(target(count)) for count in prepared.token_counts or ()]

    def sampler() -> BucketSampler:
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
        # Trainer's own word for a batch of this process: auto_find_batch_size makes it smaller while it trains.
        return BucketSampler(keys, drawn or trainer._train_batch_size * trainer.args.world_size, seed)

    trainer.train_sampler = sampler


class BucketSampler:
    """A data loader's sampler of row numbers: each `batch` of them in turn share a length.

    Each epoch draws the rows from `seed` plus the epoch's number alone: a run that resumes from a checkpoint sees what
    it would have seen. The longest batch comes first, so that memory runs out early or never; rows left over in the
    buckets make the last batches, of mixed lengths, and the only smaller batch comes at the end.
    """

    def __init__(self, lengths: Sequence[int], batch: int, seed: int) -> None:
        self._lengths, self._batch, self._seed, self._epoch = lengths, batch, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; Trainer calls it before each epoch, also when it resumes from a checkpoint (trainer.py)."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        import torch

        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        rows_drawn = torch.randperm(len(self._lengths), generator=generator).tolist()
        batches, rest = full_batches(self._lengths, rows_drawn, self._batch)
        batches = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        widths = [max(self._lengths[row] for row in rows) for rows in batches]
        longest = max(range(len(batches)), key=widths.__getitem__, default=0)
        if batches:
            batches[0], batches[longest] = batches[longest], batches[0]
        for rows in (*batches, rest):
            yield from rows


def bucket(length: int) -> int:
    """Return the number of the bucket that rows padded to `length` tokens share."""
    return -(-length // STEP)


def full_batches(lengths: Sequence[int], rows: Iterable[int], batch: int) -> tuple[list[list[int]], list[int]]:
    """Return the full batches, first those of one length each, then of mixed rest, and the rows of the last batch."""
    filling: dict[int, list[int]] = {}
    full = []
    for row in rows:
        pool = filling.setdefault(lengths[row], [])
        pool.append(row)
        if len(pool) == batch:
            full.append(filling.pop(lengths[row]))
    left = [row for length in sorted(filling, reverse=True) for row in filling[length]]
    cut = len(left) // batch * batch
    full += [left[at : at + batch] for at in range(0, cut, batch)]
    return full, left[cut:]


def optimal_buckets(counts: Sequence[int], *, top: int, limit: int, batch: int, most: int, step: int) -> Listed:
    """Return the ascending list of at most `most` lengths that gives batches of `batch` random rows least padding.

    `counts` are the rows' lengths (at least one), `top` the longest that the list must hold; `batch` 1 means
    batches of rows of like length. Lengths are multiples of `step`; the last is `top` rounded up, or `limit` where that
    is less. The shortest list wins that costs at most TOLERANCE more than the longest. Where a batch's longest row
    takes no more lengths than the list has, those lengths are the list.

    Each length costs itself times the probability that it is the next one up from a batch's longest row: a sum over
    neighbours, which dynamic programming minimises exactly.
    """
    within = _maximum_within(counts, top, min(batch, len(counts)))
    # Of very long rows fewer candidates, further apart.
    apart = step * -(-top // (step * CANDIDATES))
    candidates = [min(length, max(limit, top)) for length in range(apart, top + apart, apart)]
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


def _optimal_lists(candidates: Sequence[int], within: Sequence[float], most: int) -> list[tuple[float, Listed]]:
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
