"""How rows of tokens become batches of few shapes: a short list of lengths, chosen from the rows, to pad batches to.

Every new shape costs Metal a compiled graph and allocator blocks (pytorch#181485), and every padded token costs every
device time. A list of at most SHAPES lengths, laid where the rows are, keeps both low.

A task cuts its rows to `limit`, counts them, and lets `decide` choose; `Lengths.collator` wraps any collator:

    longest = lengths.limit(recipe, tokenizer, config)
    features = …  # cut to `longest` tokens
    length = lengths.decide(recipe, tokens.counts(features["train"]), longest, others=tokens.counts(validation))
    collator = length.value.collator(DataCollatorWithPadding(tokenizer), tokenizer)
    Prepared(…, collator=collator, token_counts=counts, choices={"lengths": length})
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.recipe import schema as recipes
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.text import buckets
from hf_mps.finetune.text.padding import PadUp, fills
from hf_mps.finetune.text.shapes import best

Padding = Literal["list", "longest", "max_length"]
SHAPES = 8
STEP = 8
DEFAULT = 128


class Padded(recipes.Recipe):
    """A recipe whose rows are tokens: the tokens that a row is cut to, and what a batch is padded to.

    `padding`: `list` (the default) is the next of a short list of lengths chosen from the rows; `longest` the batch's
    longest row, rounded up to `pad_to_multiple_of` where that is given; `max_length` the same length for every batch.
    """

    max_length: int | None = Field(default=None, ge=3)
    padding: Padding | None = None
    pad_to_multiple_of: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_padding(self) -> Padded:
        if self.padding in ("list", "max_length") and self.pad_to_multiple_of is not None:
            raise ValueError(f"has pad_to_multiple_of beside padding: {self.padding}; leave one of them out")
        return self


@dataclass(frozen=True)
class Lengths:
    """What batches are padded to. All figures in tokens, special ones included.

    `longest` is what rows are cut to, `shapes` the lengths of padding `list` in ascending order, `multiple` what
    padding `longest` rounds up to.
    """

    longest: int
    padding: Padding
    shapes: tuple[int, ...] = ()
    multiple: int | None = None

    def __str__(self) -> str:
        if self.padding == "max_length":
            return f"{self.longest} tokens in every batch"
        if self.padding == "list":
            return f"{', '.join(map(str, self.shapes))} tokens"
        return f"up to {self.longest} tokens" + (f", in steps of {self.multiple}" if self.multiple else "")

    def target(self, width: int) -> int:
        """The length that a batch is padded to whose longest row has `width` tokens."""
        if self.padding == "max_length":
            return max(width, self.longest)
        if self.padding == "longest":
            return _up(width, self.multiple or 1)
        place = bisect_left(self.shapes, width)
        # Longer than every row that the list was made from: a row of some other data, met after training.
        return self.shapes[place] if place < len(self.shapes) else max(width, min(_up(width, STEP), self.longest))

    def collator(
        self,
        inner: Callable[[list[Any]], Any],
        tokenizer: Any,
        *,
        labels: Lengths | None = None,
        filled: Mapping[str, float] | None = None,
    ) -> PadUp:
        """`inner`, whose batches are then padded up to `target`: every tensor of the rows' width, labels with -100.

        `labels` is given where labels have lengths of their own (sequence to sequence). `filled` adds what other
        columns of the rows' width are padded with ({"bbox": 0}); such a column without a filler raises ValueError.
        """
        known = {**fills(tokenizer), **(filled or {})}
        side = getattr(tokenizer, "padding_side", "right")
        return PadUp(inner, self.target, known, side, labels.target if labels is not None else None)


def limit(recipe: Padded, tokenizer: Any, config: Any, default: int = DEFAULT) -> int:
    """The tokens that a row is cut to: the recipe's `max_length`, or `default` where the model has so many positions.

    Raises UserError where `max_length`, or what `pad_to_multiple_of` makes of it, is more than the model has positions.
    """
    positions = _positions(tokenizer, config)
    wanted = recipe.max_length
    if wanted is not None and wanted > positions:
        raise UserError(f"max_length is {wanted}; allowed: at most {positions}, the positions that this model has")
    longest = wanted or min(default, positions)
    rounded = _up(longest, recipe.pad_to_multiple_of or 1)
    if rounded > positions:
        raise UserError(
            f"pad_to_multiple_of is {recipe.pad_to_multiple_of}: rows of {longest} tokens would be padded to {rounded}"
            f" and this model has {positions} positions; allowed: a max_length that is a multiple of it"
        )
    return longest


def decide(
    recipe: Padded,
    counts: Sequence[int],
    longest: int,
    *,
    others: Iterable[int] = (),
    batch: int = DEFAULT_BATCH,
    grouped: bool | None = None,
    most: int = SHAPES,
    step: int = STEP,
) -> Choice[Lengths]:
    """Choose what batches are padded to, from the length of each training row in `counts`, at most `longest`.

    `others` are the lengths of rows that the list must hold too (validation). `batch` is the number of rows where the
    recipe's `training` has none; `grouped`, whether rows of like length share a batch, is left to `batches.decide`
    unless given. `most` bounds the list; its lengths are multiples of `step`, the last one excepted, which never passes
    `longest`.
    """
    told = summary(counts, longest)
    if recipe.padding == "max_length":
        return Choice(Lengths(longest, "max_length"), f"padding in the recipe: one shape; {told}")
    if recipe.pad_to_multiple_of is not None:
        stepped = Lengths(longest, "longest", multiple=recipe.pad_to_multiple_of)
        return Choice(stepped, f"pad_to_multiple_of in the recipe; {told}")
    if recipe.padding == "longest" or (recipe.padding is None and not recipe.speedups):
        word = "padding in the recipe" if recipe.padding else "speedups is false in the recipe"
        return Choice(Lengths(longest, "longest"), f"{word}: each batch to its own longest row; {told}")
    size = recipe.training.get("per_device_train_batch_size") or batch
    alike = buckets.grouped(buckets.decide(recipe, counts, size)) if grouped is None else grouped
    top = max([*counts, *others])
    shapes = best(counts, top=top, limit=longest, batch=1 if alike else size, most=most, step=step)
    listed = Lengths(longest, "list", shapes)
    return Choice(listed, f"{_why(listed, counts, size, alike)}; {told}")


def summary(counts: Sequence[int], longest: int) -> str:
    """In words what the tokenised rows look like: half of them, the longest, and how many stand at the limit."""
    ordered = sorted(counts)
    full = sum(count >= longest for count in ordered)
    cut = f", {full} at the limit of {longest} and perhaps cut" if full else ""
    return f"half of the rows within {ordered[len(ordered) // 2]} tokens, the longest {ordered[-1]}{cut}"


def _why(listed: Lengths, counts: Sequence[int], batch: int, alike: bool) -> str:
    """What the list gains over random batches padded to their own longest rows: less padding, or fewer shapes."""
    shapes = "one shape" if len(listed.shapes) == 1 else f"{len(listed.shapes)} shapes, laid where the rows are"
    held = buckets.held(counts, batch, listed.target, alike=alike), buckets.held(counts, batch, int, alike=False)
    ours, plain = (round(100 * (1 - sum(counts) / tokens)) for tokens in held)
    if ours < plain:
        gain = f", where random batches of {batch} padded to their longest rows have {plain}%"
    elif ours > plain:
        gain = f", {plain}% where each batch is padded to its longest row and brings Metal a shape of its own"
    else:
        gain = ""
    return f"{shapes}: about {ours}% padding{gain}"


def _positions(tokenizer: Any, config: Any) -> int:
    """What a tokenizer and a configuration allow; one of them may know no limit."""
    numbers = [getattr(tokenizer, "model_max_length", None), getattr(config, "max_position_embeddings", None)]
    return min((int(number) for number in numbers if number and number > 0), default=2**31)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
