"""shape-growth: blocks that the allocator keeps for batches of other shapes are given back before they pile up."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards import moments
from hf_mps.guards.guard import Guard

MANY = 16
"""Lengths from which on a shorter list of them is suggested."""
SHARE = 0.1
"""Share of the recommended maximum that may lie idle in the allocator when a new shape comes."""


class ShapeGrowth(Guard):
    """Counts the shapes of the batches; at a new one it looks at what lies idle, and empties the cache."""

    name = "shape-growth"
    what = "the allocator keeps whole buffers for each size, so memory grows with every new shape of a batch"
    issue = "https://github.com/pytorch/pytorch/issues/132596"
    until = "the oldest supported torch has pull request #188045, whose allocator splits and joins its blocks"

    def __init__(self) -> None:
        super().__init__()
        self._shapes: set[tuple[Any, ...]] = set()
        self._lengths: set[tuple[Any, ...]] = set()  # the same without the number of rows, which a last batch changes

    def forget(self) -> None:
        """Also forget the shapes that have come."""
        super().forget()
        self._shapes.clear()
        self._lengths.clear()

    def applies(self) -> Choice[bool]:
        """Always where there is Metal: whether memory lies idle is looked at when a new shape comes."""
        return Choice(True, "memory that lies idle is looked at whenever a batch of a new shape comes")

    def install(self, module: ModuleType) -> None:
        """See batches before they are moved."""
        moments.batches(self, module, self._look)

    def _look(self, batch: Any) -> Any:
        shape = _shape(batch)
        if shape not in self._shapes:
            self._shapes.add(shape)
            if len(self._shapes) > 1:
                self._release()
            before = len(self._lengths)
            self._lengths.add(_without_rows(shape))
            if before < len(self._lengths) == MANY:
                self.acted(
                    f"batches of {MANY} different lengths so far: Metal compiles graphs and keeps memory for each; "
                    "next: few fixed lengths, for example DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64)"
                )
        return batch

    def _release(self) -> None:
        """Give back what the allocator keeps idle, where that is much."""
        import torch

        from hf_mps.device import memory

        idle = memory.driver("mps") - memory.current("mps")
        if idle <= SHARE * (memory.recommended("mps") or 0):
            return
        torch.mps.empty_cache()
        clear_graphs = getattr(torch.mps, "clear_graph_cache", None)  # newer than torch 2.13
        if clear_graphs is not None:
            clear_graphs()
        self.acted("memory kept for batches of other shapes was given back", aloud=False)


def _without_rows(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same shapes without the first number of each."""
    if shape and all(isinstance(each, tuple) for each in shape):
        return tuple(_without_rows(each) for each in shape)
    return shape[1:]


def _shape(batch: Any) -> tuple[Any, ...]:
    """The shapes of the tensors of a batch, whatever holds them."""
    if isinstance(batch, Mapping):
        return tuple(_shape(each) for each in batch.values())
    if isinstance(batch, tuple | list):
        return tuple(_shape(each) for each in batch)
    return tuple(getattr(batch, "shape", ()))


GUARD = ShapeGrowth()
