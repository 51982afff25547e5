"""Tokenised rows to a padded batch in one write a column, in place of the tokenizer's loops over every number.

`tokenizer.pad` walks each row in Python, pads lists, and makes tensors of nested lists: some 5 ms for 32 rows, more
than a GPU needs for their training step once it is a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

# What `tokenizer.pad` pads (transformers, tokenization_utils_base.py, _pad); the batch's width is that of the first.
PADDED = ("input_ids", "attention_mask", "token_type_ids", "special_tokens_mask")
LABELS = ("label", "label_ids")


def stackable(inner: Any) -> bool:
    """Whether `stack` does what the collator `inner` does: transformers' own that pads to the longest row."""
    from transformers import DataCollatorWithPadding

    return (
        type(inner) is DataCollatorWithPadding
        and inner.padding is True
        and inner.pad_to_multiple_of is None
        and inner.return_tensors == "pt"
        and inner.tokenizer.model_input_names[0] == PADDED[0]
    )


def stack(
    rows: Sequence[Mapping[str, Any]], width: Callable[[int], int], pad_values: Mapping[str, float], side: str
) -> Any:
    """Return a BatchEncoding of `rows`, each of PADDED an int64 tensor (rows, width(the longest row)), or None.

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
            padded = numpy.full((len(rows), wide), pad_values[name], dtype=numpy.int64)
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
