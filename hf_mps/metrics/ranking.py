"""How well scores put a query's relevant documents first: NDCG and the reciprocal rank, over the first ten."""

from __future__ import annotations

import math
from collections.abc import Sequence

TOP = 10


def order(scores: Sequence[float], relevance: Sequence[float]) -> list[int]:
    """Return the numbers of the documents by falling score; NaN comes last.

    Of equal scores the least relevant comes first: who scores all alike has not found anything.
    """
    known = [score if score == score else -math.inf for score in scores]
    return sorted(range(len(known)), key=lambda place: (-known[place], relevance[place]))


def ndcg(scores: Sequence[float], relevance: Sequence[float]) -> float:
    """Return sklearn.metrics.ndcg_score(k=10) of one query, except for equal scores (see `order`).

    0.0 where no document is relevant.
    """
    best = _gain(sorted(relevance, reverse=True))
    return _gain([relevance[place] for place in order(scores, relevance)]) / best if best else 0.0


def reciprocal_rank(scores: Sequence[float], relevance: Sequence[float]) -> float:
    """Return one over the rank of the first relevant document (above 0), 0.0 where none is among the first ten."""
    for rank, place in enumerate(order(scores, relevance)[:TOP], 1):
        if relevance[place] > 0:
            return 1 / rank
    return 0.0


def _gain(relevance: Sequence[float]) -> float:
    return sum(value / math.log2(rank + 1) for rank, value in enumerate(relevance[:TOP], 1))
