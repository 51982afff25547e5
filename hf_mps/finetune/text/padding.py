"""A collator around any collator: it pads the batches up to one of a list of lengths."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_mps.finetune.text.stack import stack, stackable

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

    inner: Callable[[list[Any]], Any]
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
            elif _token_level(name, column, main):
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


def _token_level(name: str, column: Any, main: Any) -> bool:
    if getattr(column, "shape", None) != main.shape:
        return False
    # A row may have as many float labels as tokens by chance; they belong to the row.
    return name != "labels" or not column.is_floating_point()
