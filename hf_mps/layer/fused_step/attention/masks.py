"""Who sees whom, asked a block at a time: a causal call, a mask that is there, and one that never is there whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hf_mps.layer.fused_step.attention.blocks import Block, Span


class Mask(Protocol):
    """`span` bounds what any query sees; `block` is True where a query of the block sees a key, None where all do."""

    span: Span

    def block(self, block: Block, device: torch.device) -> Tensor | None:
        """A bool tensor (batch or 1, query heads or 1, queries, keys)."""
        ...


class Everything:
    """Every query sees every key."""

    span = Span()

    def block(self, block: Block, device: torch.device) -> Tensor | None:
        """None."""
        return None


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
        """Its part; all query heads, of which the caller takes the block's."""
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
        """The function of the block's indices, and what is padding."""
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
        """Whether the function masks nothing in a block, as far as that is known without computing."""
        name = self.function.__qualname__
        first, last = block.queries.start + self.query_offset, block.keys.stop - 1 + self.key_offset
        return name == "bidirectional_mask_function" or (name == "causal_mask_function" and last <= first)

    def whole(self, device: torch.device) -> Tensor:
        """All of it: (batch, 1, queries, keys)."""
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
        made: UnmadeMask = Tensor._make_wrapper_subclass(
            cls, (batch, 1, queries, keys), dtype=torch.bool, device=device
        )
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
    name = getattr(function, "__qualname__", "")
    if name == "causal_mask_function":
        return Span(after=0)
    inside = _closure(function)
    if name == "and_masks.<locals>.and_mask":
        found = Span()
        for one in inside.get("mask_functions", ()):
            found = found.within(span_of(one))
        return found
    if name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        return span_of(inside["mask_function"])
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return Span(before=inside["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return Span(inside["sliding_window"], inside["sliding_window"])
    if name == "chunked_overlay.<locals>.inner_mask":
        return Span(inside["chunk_size"] - 1, inside["chunk_size"] - 1)
    return Span()


def _closure(function: Any) -> Mapping[str, Any]:
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
