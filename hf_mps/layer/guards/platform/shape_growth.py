"""shape-growth: under memory pressure, blocks that the allocator keeps for batches of other shapes are given back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Register
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard

MANY = 16
"""Lengths from which on a shorter list of them is suggested."""
PRESSURE = 0.7
"""Share of the recommended maximum that the process holds when it is time to give something back."""
GROWN = 0.1
"""Share of it by which memory has grown since the loop settled, and that lies idle: less is not worth the wait."""
SETTLED = 4
"""Looks after which a loop of one shape holds all that it needs, the optimizer's state included."""
APART = 32
"""Looks between two releases: each waits for the GPU, and the next step has its memory mapped anew.

It also compiles its graphs anew: empty_cache forgets them (pytorch#181485), and so gives back what
they hold, the larger part where shapes are many.
"""


class ShapeGrowth(Guard):
    """Looks at memory after each optimizer step and at batches of new shapes; counts the lengths of the batches.

    A loop of one shape holds the same after every step, whatever its size, and is left alone. Blocks of the step before
    lie idle between any two steps: only growth shows that they are for shapes that do not come again.
    """

    name = "shape-growth"
    what = "the allocator keeps whole buffers for each size, so memory grows with every new shape of a batch"
    patches = {training_hooks.STEPPED: Register("_stepped"), **training_hooks.batches("_at_batch")}

    def __init__(self) -> None:
        super().__init__()
        self._shapes: set[tuple[Any, ...]] = set()
        self._lengths: set[tuple[Any, ...]] = set()  # the same without the number of rows, which a last batch changes
        self._begin(wait=0)

    def forget(self) -> None:
        """Also forget the shapes that have come, and what the loop held."""
        super().forget()
        self._shapes.clear()
        self._lengths.clear()
        self._begin(wait=0)

    def _begin(self, wait: int) -> None:
        self._looks, self._wait = 0, wait
        self._held = 0  # bytes when the loop had settled

    def applies(self) -> Choice[bool]:
        """Always where there is Metal: whether memory grows shows only as a loop runs."""
        return Choice(True, f"releases memory that lies idle when it grows above {PRESSURE:.0%} of what is recommended")

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if training_hooks.steps_on_metal(optimizer):
            self.safely(self._look)

    def _at_batch(self, batch: Any) -> Any:
        shape = _shape(batch)
        if shape not in self._shapes:
            if self._shapes:  # an evaluation has no optimizer's steps
                self._look()
            self._shapes.add(shape)
            before = len(self._lengths)
            self._lengths.add(_without_rows(shape))
            if before < len(self._lengths) == MANY:
                self.acted(
                    f"batches of {MANY} different lengths so far: Metal compiles graphs and keeps memory for each; "
                    "next: few fixed lengths, for example DataCollatorWithPadding(tokenizer, pad_to_multiple_of=64)"
                )
        return batch

    def _look(self) -> None:
        """Release what lies idle where the process holds much, and more than when the loop had settled."""
        import torch

        from hf_mps.metal.device import memory

        self._looks += 1
        if self._looks == SETTLED:
            self._held = memory.driver("mps")
        if self._looks <= max(SETTLED, self._wait):
            return
        driver, recommended = memory.driver("mps"), memory.recommended("mps") or 0
        idle = driver - memory.current("mps")
        if driver <= PRESSURE * recommended or min(driver - self._held, idle) <= GROWN * recommended:
            return
        torch.mps.empty_cache()
        self._begin(wait=APART)
        self.acted("under memory pressure, blocks kept for batches of other shapes were given back", aloud=False)


def _without_rows(shape: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same shapes without the first number of each."""
    if shape and all(isinstance(each, tuple) for each in shape):
        return tuple(_without_rows(each) for each in shape)
    return shape[1:]


def _shape(batch: Any) -> tuple[Any, ...]:
    """The shapes of the tensors of a batch, whatever holds them; a list of Python's numbers or words has none."""
    if isinstance(batch, Mapping):
        return tuple(shape for each in batch.values() if (shape := _shape(each)))
    if isinstance(batch, tuple | list):
        return tuple(shape for each in batch if (shape := _shape(each)))
    return tuple(getattr(batch, "shape", ()))


GUARD = ShapeGrowth()
