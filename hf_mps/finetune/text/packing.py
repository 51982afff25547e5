"""Whole examples side by side in rows of one length, none of which sees another, for language models.

Positions start anew with each example, and attention is block-diagonal, which transformers 5 makes of such positions
where there is neither an attention mask nor a cache (masking_utils.py, `find_packed_sequence_indices`). Metal gets one
shape, and next to nothing of a row is padding. A task packs its training rows and wraps its own collator, which goes on
serving the rows that are not packed:

    packing = packing.decide(recipe, recipe.packing, model, counts["train"], longest)
    train = packing.Packed(features["train"], counts["train"], longest, tokenizer.pad_token_id)
    collator = packing.Collator(collator)
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.text import buckets
from hf_mps.finetune.text.lengths import IGNORED, SHAPES, STEP, Lengths

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.recipe.schema import Recipe

# The lengths of the two examples that a model is tried with.
TRIAL_LENGTHS = (5, 3)


class Packed:
    """Whole examples, as many in a row of `capacity` tokens as fit; `filler` pads every row to that length.

    `features` has `input_ids` and, unless all tokens count, `labels` (IGNORED where they do not): lists of equal
    length, at most `capacity` long. An example's first token is no label, because another example comes before it.
    """

    def __init__(self, features: Dataset, counts: Sequence[int], capacity: int, filler: int) -> None:
        columns = [name for name in ("input_ids", "labels") if name in features.column_names]
        self._features, self._capacity, self._filler = features.select_columns(columns), capacity, filler
        self.rows = best_fit(counts, capacity)
        self.examples = len(counts) / len(self.rows)
        """Examples in a row, on average."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, list[int]]:
        columns = self._features[self.rows[number]]
        examples = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return joined_row(examples, self._capacity, self._filler)

    def batch(self, examples: int) -> int:
        """Return how many rows hold about `examples` examples: the batch that keeps the examples of a step."""
        return max(1, round(examples / self.examples))


def joined_row(examples: Sequence[Mapping[str, list[int]]], capacity: int, filler: int) -> dict[str, list[int]]:
    """Return examples side by side as one row of `capacity` tokens, with positions that begin anew in each."""
    row: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
    for example in examples:
        ids = example["input_ids"]
        row["input_ids"] += ids
        row["labels"] += [IGNORED, *example.get("labels", ids)[1:]]
        row["position_ids"] += range(len(ids))
    rest = capacity - len(row["input_ids"])
    row["input_ids"] += [filler] * rest
    row["labels"] += [IGNORED] * rest
    row["position_ids"] += range(rest)
    return row


def best_fit(counts: Sequence[int], capacity: int) -> list[list[int]]:
    """Place examples of `counts` tokens into rows of `capacity`: longest first, each where least space remains.

    Best-fit decreasing needs asymptotically at most 11/9 of the fewest rows possible. Returns the examples' numbers by
    rows. Raises ValueError for an example longer than a row.
    """
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (space, row), in order
    for number in sorted(range(len(counts)), key=lambda number: -counts[number]):
        count = counts[number]
        if count > capacity:
            raise ValueError(f"example {number} has {count} tokens, more than a row of {capacity}")
        place = bisect_left(open_rows, (count, -1))
        if place < len(open_rows):
            space, row = open_rows.pop(place)
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        if space > count:
            insort(open_rows, (space - count, row))
    return rows


def decide(recipe: Recipe, requested: bool | None, model: Any, counts: Sequence[int], capacity: int) -> Choice[bool]:
    """Choose whether to pack examples of `counts` tokens into rows of `capacity`; `requested` is the recipe's word or
    None.

    Raises UserError where the recipe asks for it and `model` lets packed examples see each other.
    """
    if requested is False or (requested is None and not recipe.optimizations):
        return Choice(False, "packing in the recipe" if requested is False else "optimizations is false in the recipe")
    obstacle = packing_obstacle(model)
    if requested:
        if obstacle:
            raise UserError(f"packing is true, and {obstacle}; next: packing=false")
        return Choice(True, "packing in the recipe")
    if obstacle:
        return Choice(False, obstacle)
    rows = len(best_fit(counts, capacity))
    waste = 1 - sum(counts) / (rows * capacity)
    shapes = buckets.optimal_buckets(counts, top=max(counts), limit=capacity, batch=1, most=SHAPES, step=STEP)
    # Bucketing at its best: each row is padded to the next length of the list.
    listed = 1 - sum(counts) / buckets.padded_tokens(counts, 1, Lengths(capacity, "list", shapes).target, alike=False)
    if waste >= listed:
        return Choice(False, f"no less padding than batches of like length have: {waste:.1%} against {listed:.1%}")
    summary = f"{len(counts)} examples in {rows} rows of {capacity} tokens, {waste:.1%} padding"
    return Choice(True, f"{summary} ({listed:.1%} in batches of like length); none sees another")


def packing_obstacle(model: Any) -> str:
    """Return why examples may not be packed for `model`, or ""; two short ones are tried, packed and alone."""
    import torch

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        return f"{type(inner).__name__} takes no position_ids, so that packed examples would see each other"
    if inner.device.type == "meta":  # `hf-mps plan`: a tiny copy is tried
        from hf_mps.finetune.smoke import tiny_copy

        tiny = tiny_copy(inner)
        return "there is no tiny model of its class to try it on" if tiny is None else packing_obstacle(tiny)
    words, device = inner.get_input_embeddings().weight.shape[0], inner.device
    first, second = (torch.arange(1, n + 1, device=device).remainder(words).flip(0)[None] for n in TRIAL_LENGTHS)
    count, other_count = TRIAL_LENGTHS
    packed = torch.cat([first, second], 1)
    positions = torch.tensor([[*range(count), *range(other_count)]], device=device)
    training = inner.training
    inner.eval()
    try:
        with torch.no_grad():
            together = inner(input_ids=packed, position_ids=positions, use_cache=False).logits[:, count:].float()
            alone = inner(input_ids=second, use_cache=False).logits.float()
    finally:
        inner.train(training)
    # In 16 bits the two passes round their sums differently.
    tolerance = 1e-3 if inner.dtype == torch.float32 else 5e-2
    if torch.allclose(together, alone, rtol=tolerance, atol=tolerance * float(alone.abs().max())):
        return ""
    return f"{type(inner).__name__} lets packed examples see each other"


@dataclass
class Collator:
    """Passes batches of `Packed` rows on as they are; `inner` makes those of any other rows."""

    inner: Callable[[list[Any]], Any]

    def __call__(self, rows: list[Any]) -> Any:
        if "position_ids" not in rows[0]:
            return self.inner(rows)
        from transformers import default_data_collator

        # With a cache the attention would not be block-diagonal.
        return {**default_data_collator(rows), "use_cache": False}
