"""How texts become batches of few shapes: the longest length, and what a batch is padded to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hf_mps.choice import Choice
from hf_mps.errors import UserError

Padding = Literal["longest", "max_length"]
SHAPES = 8
DEFAULT = 128


@dataclass(frozen=True)
class Lengths:
    """`longest` in tokens, special ones included; `padding` and `multiple` as a tokenizer's `pad` takes them."""

    longest: int
    padding: Padding
    multiple: int | None

    def __str__(self) -> str:
        if self.padding == "max_length":
            return f"{self.longest} tokens in every batch"
        return f"up to {self.longest} tokens" + (f", in steps of {self.multiple}" if self.multiple else "")


def decide(
    longest: int | None, padding: Padding | None, multiple: int | None, device: str, tokenizer: Any, config: Any
) -> Choice[Lengths]:
    """Choose what batches are padded to; `longest`, `padding` and `multiple` are the user's word where not None.

    Raises UserError where `longest` is more than the model has positions for.
    """
    limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
    limit = min(int(number) for number in limits if number)
    if longest is not None and longest > limit:
        raise UserError(f"max_length is {longest}; allowed: at most {limit}, the positions that this model has")
    longest = longest or min(DEFAULT, limit)
    if padding == "max_length":
        return Choice(Lengths(longest, padding, None), "padding in the recipe: one shape")
    if multiple is not None:
        return Choice(Lengths(longest, "longest", multiple), "pad_to_multiple_of in the recipe")
    if padding is None and device == "mps":
        return _few_shapes(longest, limit)
    reason = "padding in the recipe" if padding else "each batch to its own longest row: the least waste"
    return Choice(Lengths(longest, "longest", None), reason)


def _few_shapes(longest: int, limit: int) -> Choice[Lengths]:
    """Steps that leave at most SHAPES lengths, each a multiple of 8."""
    step = max(8, -(-longest // SHAPES // 8) * 8)
    shapes = -(-longest // step)
    if shapes * step > limit:
        return Choice(
            Lengths(longest, "max_length", None), f"one shape: steps of {step} would pass the model's {limit}"
        )
    reason = f"at most {shapes} shapes: Metal compiles a graph for each new one (pytorch#181485)"
    return Choice(Lengths(longest, "longest", step), reason)


def summary(lengths: Sequence[int], longest: int) -> str:
    """In words what the tokenised rows look like: half of them, the longest, and how many stand at the limit."""
    ordered = sorted(lengths)
    full = sum(length >= longest for length in ordered)
    cut = f", {full} at the limit and perhaps cut" if full else ""
    return f"half of the rows within {ordered[len(ordered) // 2]} tokens, the longest {ordered[-1]}{cut}"
