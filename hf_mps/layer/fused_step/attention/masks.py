"""How a call of attention is cut into blocks within a number of bytes, and who sees whom in a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

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
        """Return what both allow."""
        return Span(_least(self.before, other.before), _least(self.after, other.after))

    def shifted(self, places: int) -> Span:
        """Return the same keys, seen from queries that are counted from `places` further on."""
        before = None if self.before is None else self.before - places
        return Span(before, None if self.after is None else self.after + places)


def _least(first: int | None, second: int | None) -> int | None:
    return min((each for each in (first, second) if each is not None), default=None)


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
    # A window of keys grows by the block's queries, and its ends are rounded outwards (`_keys`).
    of_query = shape.group * widest
    together = shape.batch * shape.heads
    queries = elements // max(1, of_query * together)
    if queries < min(FEWEST_QUERIES, most):
        queries = min(FEWEST_QUERIES, most, max(1, elements // of_query))
        together = max(1, elements // (of_query * queries))
    queries = max(1, min(queries, most, SUMMED // shape.group))
    rows = max(1, min(shape.batch, together // shape.heads))
    # Parts of at most `queries` that are nearly alike.
    alike = -(-shape.queries // -(-shape.queries // queries))
    rounded = -(-alike // MULTIPLE) * MULTIPLE
    return rows, max(1, min(shape.heads, together)), rounded if rounded <= queries else alike


def _reach(span: Span) -> int | None:
    """Return how many keys a window has; None where it is none."""
    return None if span.before is None or span.after is None else max(0, span.before + span.after)


def _ranges(whole: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, whole)) for start in range(0, whole, size))


def _keys(queries: slice, keys: int, span: Span, size: int) -> slice:
    """Return the keys that some query of a block may see, rounded outwards so that few lengths occur; never none."""
    step = max(size, -(-keys // LENGTHS)) if _reach(span) is None else FEWEST_QUERIES
    first = 0 if span.before is None else max(0, queries.start - span.before) // step * step
    last = keys if span.after is None else min(keys, -(-(queries.stop + span.after) // step) * step)
    first = min(first, keys - 1)
    return slice(first, max(last, first + 1))


class Mask(Protocol):
    """`span` bounds what any query sees; `block` is True where a query of the block sees a key, None where all do."""

    span: Span

    def block(self, block: Block, device: torch.device) -> Tensor | None:
        """Return a bool tensor (batch or 1, query heads or 1, queries, keys)."""
        ...


class Causal:
    """A query sees the keys up to its own place, counted from the first: `is_causal` of PyTorch's attention."""

    span = Span(after=0)

    def block(self, block: Block, device: torch.device) -> Tensor | None:
        """None below the diagonal."""
        if block.keys.stop - 1 <= block.queries.start:
            return None
        queries = torch.arange(block.queries.start, block.queries.stop, device=device)
        keys = torch.arange(block.keys.start, block.keys.stop, device=device)
        return (queries[:, None] >= keys[None, :])[None, None]


class Given:
    """A bool tensor that broadcasts to (batch, query heads, queries, keys)."""

    span = Span()

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def block(self, block: Block, device: torch.device) -> Tensor:
        """Return its part; all query heads, of which the caller takes the block's."""
        return part(self.mask, block)


class Indexed:
    """A mask that transformers describes by a function of indices, as `masking_utils.sdpa_mask` takes it.

    `function(batch, head, query, key)` gets index tensors that broadcast; `padding` is (batch, keys seen so far), False
    where a key is padding.
    """

    def __init__(self, function: Callable[..., Tensor], shape: tuple[int, int, int], **described: Any) -> None:
        self.function, self.shape = function, shape
        self.query_offset = described.get("q_offset", 0)
        self.key_offset = described.get("kv_offset", 0)
        self.padding: Tensor | None = described.get("attention_mask")
        self.span = span_of(function).shifted(self.query_offset - self.key_offset)

    def block(self, block: Block, device: torch.device) -> Tensor | None:
        """Return the function of the block's indices, and what is padding."""
        seen = None if self._is_whole(block) else self._computed(block, device)
        if self.padding is None:
            return seen
        there = slice(block.keys.start + self.key_offset, block.keys.stop + self.key_offset)
        padding = self.padding[block.batch, None, None, there]
        return padding if seen is None else seen & padding

    def _computed(self, block: Block, device: torch.device) -> Tensor:
        batch = torch.arange(block.batch.start, block.batch.stop, device=device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        query = torch.arange(block.queries.start, block.queries.stop, device=device) + self.query_offset
        key = torch.arange(block.keys.start, block.keys.stop, device=device) + self.key_offset
        return self.function(batch, head, query[None, None, :, None], key[None, None, None, :])

    def _is_whole(self, block: Block) -> bool:
        """Return whether the function masks nothing in a block, as far as that is known without computing."""
        name = self.function.__qualname__
        first, last = block.queries.start + self.query_offset, block.keys.stop - 1 + self.key_offset
        return name == "bidirectional_mask_function" or (name == "causal_mask_function" and last <= first)

    def whole(self, device: torch.device) -> Tensor:
        """Return the whole mask: (batch, 1, queries, keys)."""
        batch, queries, keys = self.shape
        everything = Block(slice(0, batch), slice(0, 1), slice(0, queries), slice(0, keys))
        seen = self.block(everything, device)
        seen = torch.ones(1, dtype=torch.bool, device=device) if seen is None else seen
        return seen.expand(batch, 1, queries, keys)


class UnmadeMask(Tensor):
    """An `Indexed` mask as a bool tensor of (batch, 1, queries, keys) that takes no memory.

    Models pass it on to their layers as any mask. Where one computes with it, it is made whole, and the result is a
    tensor as others are.
    """

    indexed: Indexed

    @staticmethod
    def __new__(cls, indexed: Indexed, device: torch.device) -> UnmadeMask:
        batch, queries, keys = indexed.shape
        shape = (batch, 1, queries, keys)
        made: UnmadeMask = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        made.indexed = indexed
        return made

    def __init__(self, indexed: Indexed, device: torch.device) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnmadeMask({tuple(self.shape)}, device={self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def whole(mask: UnmadeMask) -> Tensor:
            return mask.indexed.whole(mask.device)

        return func(*tree_map_only(cls, whole, args), **tree_map_only(cls, whole, kwargs or {}))


def part(mask: Tensor, block: Block) -> Tensor:
    """What of a tensor that broadcasts to (batch, query heads, queries, keys) belongs to a block, all heads of it."""
    mask = mask[(None,) * (4 - mask.dim())]
    for axis, which in ((0, block.batch), (2, block.queries), (3, block.keys)):
        if mask.shape[axis] > 1:
            mask = mask.narrow(axis, which.start, which.stop - which.start)
    return mask


def span_of(function: Callable[..., Any]) -> Span:
    """What one of transformers' mask functions allows at most, read from what it is made of; unknown ones allow all.

    Source: transformers' masking_utils.py. In a packed row positions and places differ by the same within an example,
    and none is seen from another, so that the bounds hold there too.
    """
    # A function within another keeps what that was called with.
    of_name = _SPANS.get(getattr(function, "__qualname__", "").replace(".<locals>.inner_mask", ""))
    return of_name(_closure(function)) if of_name else Span()


_SPANS: dict[str, Callable[[Mapping[str, Any]], Span]] = {
    "causal_mask_function": lambda inside: Span(after=0),
    "and_masks.<locals>.and_mask": lambda inside: reduce(Span.within, map(span_of, inside["mask_functions"]), Span()),
    "remap_positions_for_packed_sequence": lambda inside: span_of(inside["mask_function"]),
    "sliding_window_overlay": lambda inside: Span(before=inside["sliding_window"] - 1),
    "sliding_window_bidirectional_overlay": lambda inside: Span(inside["sliding_window"], inside["sliding_window"]),
    "chunked_overlay": lambda inside: Span(inside["chunk_size"] - 1, inside["chunk_size"] - 1),
}
"""Name of a mask function, or of what made it -> its span, by what it keeps."""


def _closure(function: Any) -> Mapping[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
