"""A collator around any collator: it pads the batches up to one of a list of lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
