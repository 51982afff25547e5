"""How a call of attention is cut: blocks of queries, each with the keys that it may see, within a number of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

BLOCK_BYTES = 32 * 2**20
"""Bytes of one block's scores in float32: large enough to fill a GPU, so that blocks, and launches, stay few.

A backward pass holds three such blocks at most.
"""
FEWEST_QUERIES = 128
"""Batch rows and heads are taken apart before a block gets fewer queries than this: small products are slow."""
MULTIPLE = 32
"""Blocks have a multiple of so many queries, where they have more than that."""
LENGTHS = 8
"""How many lengths of key ranges a causal call may have at most: Metal compiles a graph for every shape."""
SUMMED = 16384
"""The most products in one sum: chips up to M2 add up more than 32,766 wrongly before torch 2.14 (pytorch#193487)."""


class Span(NamedTuple):
    """Which keys the query at a place may see at most: from `before` places back to `after` places on; None: all."""

    before: int | None = None
    after: int | None = None

    def within(self, other: Span) -> Span:
        """What both allow."""
        return Span(_least(self.before, other.before), _least(self.after, other.after))

    def shifted(self, places: int) -> Span:
        """The same keys, seen from queries that are counted from `places` further on."""
        before = None if self.before is None else self.before - places
        return Span(before, None if self.after is None else self.after + places)


def _least(first: int | None, second: int | None) -> int | None:
    known = [each for each in (first, second) if each is not None]
    return min(known) if known else None


class Shape(NamedTuple):
    """Of a call: rows of the batch, heads of the keys, queries' heads for each of them, queries and keys in a row."""

    batch: int
    heads: int
    group: int
    queries: int
    keys: int


class Block(NamedTuple):
    """A piece of a call: ranges of batch rows, heads of the keys, queries and keys."""

    batch: slice
    heads: slice
    queries: slice
    keys: slice


def cut(shape: Shape, span: Span = Span(), budget: int = BLOCK_BYTES) -> Iterator[Block]:  # noqa: B008
    """The blocks of a call, the same ones in the same order whenever it is asked: their scores fit `budget` bytes.

    A single query against all keys is the least that a block can be, whatever the budget.
    """
    rows, heads, queries = _sizes(shape, span, budget // 4)
    for batch in _ranges(shape.batch, rows):
        for head in _ranges(shape.heads, heads):
            for query in _ranges(shape.queries, queries):
                yield Block(batch, head, query, _keys(query, shape.keys, span, queries))


def _sizes(shape: Shape, span: Span, elements: int) -> tuple[int, int, int]:
    """Batch rows, heads and queries of a block with at most so many scores."""
    reach = _reach(span)
    most = shape.queries if reach is None else min(shape.queries, max(reach, FEWEST_QUERIES))
    widest = shape.keys if reach is None else min(shape.keys, reach + most + 2 * FEWEST_QUERIES)
    of_query = shape.group * widest
    together = shape.batch * shape.heads
    queries = elements // max(1, of_query * together)
    if queries < min(FEWEST_QUERIES, most):
        queries = min(FEWEST_QUERIES, most, max(1, elements // of_query))
        together = max(1, elements // (of_query * queries))
    queries = max(1, min(queries, most, SUMMED // shape.group))
    rows = max(1, min(shape.batch, together // shape.heads))
    return rows, max(1, min(shape.heads, together)), _even(shape.queries, queries)


def _reach(span: Span) -> int | None:
    """How many keys a window has; None where it is none."""
    return None if span.before is None or span.after is None else max(0, span.before + span.after)


def _even(whole: int, most: int) -> int:
    """The size of parts of at most `most` that are nearly alike."""
    part = -(-whole // -(-whole // most))
    rounded = -(-part // MULTIPLE) * MULTIPLE
    return rounded if rounded <= most else part


def _ranges(whole: int, size: int) -> Iterator[slice]:
    for start in range(0, whole, size):
        yield slice(start, min(start + size, whole))


def _keys(queries: slice, keys: int, span: Span, size: int) -> slice:
    """The keys that some query of a block may see, rounded outwards so that few lengths occur; never none."""
    step = max(size, -(-keys // LENGTHS)) if _reach(span) is None else FEWEST_QUERIES
    first = 0 if span.before is None else max(0, queries.start - span.before) // step * step
    last = keys if span.after is None else min(keys, -(-(queries.stop + span.after) // step) * step)
    first = min(first, keys - 1)
    return slice(first, max(last, first + 1))
