"""Batches of few shapes: each batch is padded to one of a short list of lengths, chosen from the rows.

Every new shape costs Metal a compiled graph and allocator blocks (pytorch#181485), and every padded token costs time on
every device. A list of at most SHAPES lengths, chosen from the rows' own, keeps both low. A CPU pays for tokens alone.

A task cuts its rows to `limit`, counts them, and calls `decide`; `Lengths.collator` wraps any collator:

    longest = lengths.limit(recipe, tokenizer, config)
    features = …  # cut to `longest` tokens
    counts = {split: tokens.counts(some) for split, some in features.items()}
    length = lengths.decide(recipe, counts, longest)
    collator = length.value.collator(DataCollatorWithPadding(tokenizer), tokenizer)
    Prepared(…, collator=collator, token_counts=counts["train"], choices={"lengths": length})
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field

from hf_mps.core import notices
from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.recipe.training_section import DEFAULT_BATCH
from hf_mps.finetune.text import buckets
from hf_mps.metal.device import choose

Padding = Literal["list", "longest", "max_length"]
Counts = Mapping[str, Sequence[int]]
"""The length of each row, by split."""
SHAPES = 8
STEP = 8
DEFAULT = 128
# More positions than any model has: what tokenizers and configurations without a limit are taken to allow.
UNLIMITED = 2**31
# Tokens that a saved model without a run and without a limit (T5) reads of a row: what T5 was pretrained on.
UNSAID = 512
KEPT = "those of its run"
_chosen: ContextVar[Mapping[str, Any]] = ContextVar("lengths of a run", default=MappingProxyType({}))


class Padded(schema.Recipe):
    """A recipe whose rows are tokens: the tokens that a row is cut to, and what a batch is padded to.

    `padding`: `list` (the default on a GPU) is the next of a short list of lengths chosen from the rows; `longest` (the
    default on a CPU) the batch's longest row, rounded up to `pad_to_multiple_of` where that is given; `max_length` the
    same length for every batch.
    """

    max_length: int | None = Field(default=None, ge=3)
    """The tokens that a row is cut to."""
    padding: Padding | None = None
    """What a batch is padded to: a short list of lengths, its longest row, or always max_length."""
    pad_to_multiple_of: int | None = Field(default=None, ge=1)
    """With padding=longest: rounds the length up to a multiple."""

    def wrong(self) -> Iterator[str]:
        if self.padding in ("list", "max_length") and self.pad_to_multiple_of is not None:
            yield f"has pad_to_multiple_of beside padding: {self.padding}; leave one of them out"


@dataclass(frozen=True)
class Lengths:
    """What batches are padded to. All figures are in tokens, special tokens included.

    Rows are cut to `longest`; `shapes` are the lengths of padding `list` in ascending order; padding `longest` rounds
    up to `multiple`.
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
        """Return the length that a batch is padded to when its longest row has `width` tokens."""
        if self.padding == "max_length":
            return max(width, self.longest)
        if self.padding == "longest":
            return _round_up(width, self.multiple or 1)
        place = bisect_left(self.shapes, width)
        # A row longer than all that the list was made from comes from other data, after training.
        return self.shapes[place] if place < len(self.shapes) else max(width, min(_round_up(width, STEP), self.longest))

    def collator(
        self, inner: Inner, tokenizer: Any, *, labels: Lengths | None = None, filled: Mapping[str, float] | None = None
    ) -> PadToBucket:
        """Wrap `inner` so that its batches are padded up to `target`: each tensor of the rows' width, labels by -100.

        `labels` is for labels with lengths of their own (sequence to sequence). `filled` adds the padding of other
        columns of the rows' width ({"bbox": 0}); such a column without one raises ValueError.
        """
        known = {**pad_values(tokenizer), **(filled or {})}
        side = getattr(tokenizer, "padding_side", "right")
        return PadToBucket(inner, self.target, known, side, labels.target if labels is not None else None)


def limit(recipe: Padded, tokenizer: Any, config: Any, default: int = DEFAULT) -> int:
    """Return the tokens that a row is cut to: the recipe's `max_length`, or `default`, within the model's positions.

    A file's `max_length` that the model has not gives way to its positions, with a line. Raises UserError for one that
    was typed, and where it exceeds the positions when rounded up to `pad_to_multiple_of`.
    """
    most = positions(tokenizer, config)
    longest = min(recipe.max_length or default, most)
    if recipe.max_length is not None and recipe.max_length > most:
        if "max_length" in recipe._typed:
            told = f"allowed: at most {most}, the positions that this model has; next: max_length={most}"
            raise UserError(f"max_length is {recipe.max_length}; {told}")
        notices.print_notice(f"max_length is {most}, not the recipe's {recipe.max_length}: the model has no more")
    rounded = _round_up(longest, recipe.pad_to_multiple_of or 1)
    if rounded > most:
        told = f"{longest} tokens would become {rounded}, and this model has {most} positions"
        allowed = "allowed: a max_length that is a multiple of it"
        raise UserError(f"pad_to_multiple_of is {recipe.pad_to_multiple_of}: {told}; {allowed}")
    return longest


def of_a_run(chosen: Mapping[str, Any], name: str = "lengths") -> dict[str, Any] | None:
    """Return the fields of the lengths that a run chose, from results.json; None where it has none."""
    said = chosen.get(name)
    return {**said, "shapes": tuple(said["shapes"])} if isinstance(said, Mapping) else None


@contextmanager
def those_of(chosen: Mapping[str, Any]) -> Iterator[None]:
    """Let `decide` return what a run chose while the context lasts: its model is measured on batches as it had them.

    What is silence or padding to a model without an attention mask (wav2vec 2.0's first ones) changes its answers.
    """
    token = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(token)


def decided() -> Mapping[str, Any]:
    """Return the choices of the run whose lengths are to be taken, of `those_of`; empty where new ones are decided."""
    return _chosen.get()


def kept(recipe: Padded, chosen: Mapping[str, Any], tokenizer: Any, config: Any) -> Choice[Lengths]:
    """Return what a saved model's rows are cut and padded to: what its run chose.

    `chosen` are the values of that run's choices. A model without a run reads as many tokens as it has positions, or
    UNSAID where it knows no limit, in steps of STEP. Raises UserError as `limit`.
    """
    if (said := of_a_run(chosen)) is not None:
        return Choice(Lengths(**said), KEPT)
    most = positions(tokenizer, config)
    longest = limit(recipe, tokenizer, config, most if most < UNLIMITED else UNSAID)
    return Choice(Lengths(longest, "list"), "its positions" if recipe.max_length is None else "max_length")


def decide(
    recipe: Padded, rows: Counts, longest: int, *, of: str = "train", grouped: bool | None = None, name: str = "lengths"
) -> Choice[Lengths]:
    """Choose what batches are padded to, from the lengths of the rows of each split, at most `longest`.

    The split `of` decides, and the list holds those of the others too. `grouped` says whether rows of like length share
    a batch, and defaults to what `buckets.decide` chooses. The list has at most SHAPES lengths, all multiples of STEP
    but the last, which never exceeds `longest`. Within `those_of` it is what that run chose under `name`.
    """
    if (said := of_a_run(decided(), name)) is not None:
        return Choice(Lengths(**said), KEPT)
    counts = rows[of]
    told = summary(counts, longest)
    if recipe.padding == "max_length":
        return Choice(Lengths(longest, "max_length"), f"padding in the recipe: one shape; {told}")
    if recipe.pad_to_multiple_of is not None:
        stepped = Lengths(longest, "longest", multiple=recipe.pad_to_multiple_of)
        return Choice(stepped, f"pad_to_multiple_of in the recipe; {told}")
    if recipe.padding == "longest" or (recipe.padding is None and not recipe.optimizations):
        reason = "padding in the recipe" if recipe.padding else "optimizations is false in the recipe"
        return Choice(Lengths(longest, "longest"), f"{reason}: each batch to its own longest row; {told}")
    if recipe.padding is None and choose().value == "cpu":
        reason = "a CPU compiles nothing for a new shape, so each batch goes to its own longest row"
        return Choice(Lengths(longest, "longest"), f"{reason}; {told}")
    size = recipe.training.get("per_device_train_batch_size") or DEFAULT_BATCH
    alike = buckets.grouped(buckets.decide(recipe, counts, size)) if grouped is None else grouped
    top = max(itertools.chain(*rows.values()))
    shapes = buckets.optimal_buckets(counts, top=top, limit=longest, batch=1 if alike else size, most=SHAPES, step=STEP)
    listed = Lengths(longest, "list", shapes)
    # What the list gains over random batches padded to their own longest rows: less padding, or fewer shapes.
    ways = ((listed.target, alike), (int, False))
    padded = (buckets.padded_tokens(counts, size, target, alike=same) for target, same in ways)
    ours, plain = (round(100 * (1 - sum(counts) / number)) for number in padded)
    gain = f", where random batches of {size} padded to their longest rows have {plain}%" if ours < plain else ""
    if ours > plain:
        gain = f", {plain}% where each batch is padded to its longest row, often a shape new to Metal"
    shown = "one length" if len(shapes) == 1 else f"{len(shapes)} lengths, chosen from your data"
    return Choice(listed, f"{shown}: about {ours}% padding{gain}; {told}")


def summary(counts: Sequence[int], longest: int) -> str:
    """Describe the tokenised rows: their median, the longest, and how many are at the limit."""
    ordered = sorted(counts)
    full = sum(count >= longest for count in ordered)
    cut = f", {full} at the limit of {longest} and perhaps cut" if full else ""
    return f"half of the rows within {ordered[len(ordered) // 2]} tokens, the longest {ordered[-1]}{cut}"


def positions(tokenizer: Any, config: Any) -> int:
    """Return the positions that tokenizer and configuration allow; either may know no limit."""
    numbers = [getattr(tokenizer, "model_max_length", None), getattr(config, "max_position_embeddings", None)]
    return min((int(number) for number in numbers if number and number > 0), default=UNLIMITED)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


Inner = Callable[[list[Any]], Any]
"""A collator that another one calls."""
IGNORED = -100
"""The label that transformers' losses ignore."""
MAIN = ("input_ids", "input_values", "input_features", "inputs_embeds")
DECODER = ("labels", "decoder_input_ids", "decoder_attention_mask")


def pad_values(tokenizer: Any) -> dict[str, float]:
    """Return what each column is padded with: the tokenizer's own values, and -100 for labels."""
    pad = tokenizer.pad_token_id
    return {
        "input_ids": pad,
        "attention_mask": 0,
        "token_type_ids": tokenizer.pad_token_type_id,
        "position_ids": 0,
        "special_tokens_mask": 1,
        "labels": IGNORED,
        "decoder_input_ids": pad,
        "decoder_attention_mask": 0,
    }


@dataclass
class PadToBucket:
    """Pads what `inner` returns: each tensor of the rows' width to `target(width)`.

    The rows' width is the last dimension of the batch's main column (`input_ids`, shape (rows, width) or (rows,
    choices, width)). Integer labels of the rows' own shape are padded too; with `labels` given, labels and the
    decoder's columns are padded to `labels(their width)` instead. All other columns stay as they are.

    Raises ValueError for a column of the rows' shape that `pad_values` does not hold.
    """

    inner: Inner
    target: Callable[[int], int]
    pad_values: Mapping[str, float]
    side: str = "right"
    labels: Callable[[int], int] | None = None
    _stackable: bool | None = field(default=None, init=False, repr=False)

    def __call__(self, features: list[Any]) -> Any:
        if self._stackable is None:
            self._stackable = stackable(self.inner)
        if self._stackable and (stacked := stack(features, self.target, self.pad_values, self.side)) is not None:
            return stacked
        batch = self.inner(features)
        main = next(batch[name] for name in MAIN if name in batch)
        decoder_columns = DECODER if self.labels is not None else ()
        for name, column in list(batch.items()):
            if name in decoder_columns:
                assert self.labels is not None
                # A decoder starts on the left, whichever side the encoder's rows are padded on.
                batch[name] = self._up(name, column, self.labels(column.shape[-1]), "right")
            elif getattr(column, "shape", None) == main.shape and not (name == "labels" and column.is_floating_point()):
                # A row may have as many float labels as tokens by chance; they belong to the row.
                batch[name] = self._up(name, column, self.target(main.shape[-1]), self.side)
        return batch

    def _up(self, name: str, column: Any, width: int, side: str) -> Any:
        missing = width - column.shape[-1]
        if missing <= 0:
            return column
        if name not in self.pad_values:
            raise ValueError(f"the padding value of column {name} is unknown; known: {', '.join(self.pad_values)}")
        from torch.nn.functional import pad

        return pad(column, (0, missing) if side == "right" else (missing, 0), value=self.pad_values[name])


# What `tokenizer.pad` pads (transformers, tokenization_utils_base.py, _pad); the batch's width is that of the first.
PADDED = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask")
LABELS = ("label", "label_ids")


def stackable(inner: Any) -> bool:
    """Return whether `stack` does what the collator `inner` does: transformers' own that pads to the longest row."""
    from transformers import DataCollatorWithPadding

    return (
        type(inner) is DataCollatorWithPadding
        and inner.padding is True
        and inner.pad_to_multiple_of is None
        and inner.return_tensors == "pt"
        and inner.tokenizer.model_input_names[0] == PADDED[0]
    )


def stack(rows: Sequence[Mapping[str, Any]], width: Callable[[int], int], fill: Mapping[str, float], side: str) -> Any:
    """Return a BatchEncoding of tokenised rows in one write a column, in place of `tokenizer.pad`.

    That walks each row in Python, pads lists, and makes tensors of nested lists: some 5 ms for 32 rows, more than a GPU
    needs for their training step once it is a CUDA graph. What comes of `rows` is each of PADDED as an int64 tensor
    (rows, width(the longest row)), or None.

    Other columns are one number a row, whose tensor has the dtype that torch gives their list; labels are called
    `labels`. None is for rows with anything else, which are left to the tokenizer.
    """
    import numpy
    import torch
    from transformers import BatchEncoding

    first = rows[0]
    if not isinstance(first, Mapping) or PADDED[0] not in first or "attention_mask" not in first:
        return None
    lengths = [len(row[PADDED[0]]) for row in rows]
    wide = width(max(lengths))
    batch: dict[str, Any] = {}
    for name in first:
        column = [row[name] for row in rows]
        if name in PADDED:
            if [len(values) for values in column] != lengths:
                return None
            padded = numpy.full((len(rows), wide), fill[name], dtype=numpy.int64)
            for place, (values, length) in enumerate(zip(column, lengths, strict=True)):
                padded[place, slice(length) if side == "right" else slice(wide - length, wide)] = values
            batch[name] = torch.from_numpy(padded)
        elif all(type(value) in (int, float) for value in column):
            batch[name] = torch.tensor(column)
        else:
            return None
    for name in LABELS:
        if name in batch:
            batch["labels"] = batch.pop(name)
    return BatchEncoding(batch)
