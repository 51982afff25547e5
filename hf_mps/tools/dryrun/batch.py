"""Batches of one shape for a training step: so many rows, each so long, whatever the rows at hand are like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.tasks import Prepared

IDS, SOUND, PIXELS = "input_ids", "input_values", "pixel_values"
# What an encoder-decoder model reads and writes on its decoder's side.
TARGETS = ("labels", "decoder_input_ids", "decoder_attention_mask")


@dataclass(frozen=True)
class Width:
    """The width of a batch's rows: `tokens`, `targets` of the answers, `samples` of sound; None leaves it as it is."""

    tokens: int | None = None
    targets: int | None = None
    samples: int | None = None

    def __str__(self) -> str:
        if self.tokens:
            return f"of {self.tokens} tokens" + (f" and {self.targets} of the answer" if self.targets else "")
        return f"of {self.samples:,} samples" if self.samples else ""


def width(recipe: Any, prepared: Prepared, length: int | None = None) -> Width:
    """What `recipe` cuts rows to, which the longest of real rows may reach; `length` is the user's word for the tokens.

    The rows that `prepared` has may be cut shorter, as made-up ones are.

    Raises UserError where rows have no tokens, and for more tokens than the model has positions.
    """
    limit, lengths = getattr(recipe, "max_duration_in_seconds", None), prepared.choices.get("lengths")
    answers = prepared.choices.get("target_lengths")  # None where answers have no lengths of their own
    targets = int(answers.value.longest) if answers else None
    if prepared.token_counts is None or limit is not None:
        if length is not None:
            set_by = "max_duration_in_seconds=N" if limit is not None else "the model's configuration"
            raise UserError(f"--length {length}: rows of {recipe.task} have no tokens; their size is set by {set_by}")
        rate = int(lengths.value.rate) if lengths is not None and limit is not None else 0
        return Width(None, targets, round(limit * rate) if limit is not None else None)
    positions = _positions(prepared.model)
    if length is not None and positions is not None and length > positions:
        raise UserError(f"--length {length}: allowed: at most {positions}, the positions that this model has")
    if length is None:
        length = max(prepared.choices["lengths"].value.longest, getattr(recipe, "max_length", None) or 0)
        length = min(length, positions or length)
    return Width(length, targets)


def collate(prepared: Prepared, trainer: Any, rows: int, wide: Width, first: int = 0) -> dict[str, Any]:
    """Return a batch of `rows` training rows as the trainer collates them, from row `first` on, begun again at the end.

    The batch is widened to `wide` afterwards, since collators pad to the lengths of the rows at hand.
    """
    count = len(prepared.sample)
    chosen = [dict(prepared.sample[(first + number) % count]) for number in range(rows)]
    return widened((prepared.dryrun_batch or trainer.data_collator)(chosen), wide)


def widened(batch: Mapping[str, Any], wide: Width) -> dict[str, Any]:
    """Return the batch with each tensor of tokens (…, T) or samples repeated or cut to its width, labels of each token
    (…, T, labels) too; others stay as they are.

    Tensors that are as wide as the ids whose prefix they share (`anchor_input_ids`) belong to them. Where answers have
    a width of their own (`wide.targets`), their tensors get that one.
    """
    result = dict(batch)
    if wide.targets is not None:
        result |= {name: _repeated(batch[name], wide.targets) for name in TARGETS if name in batch}
    for name, ids in batch.items():
        kind = next((kind for kind in (IDS, SOUND) if name.endswith(kind)), None)
        size = wide.tokens if kind == IDS else wide.samples
        if kind is None or size is None or name in TARGETS:
            continue
        table: Any = batch.get("labels")
        if getattr(table, "shape", ())[:-1] == ids.shape:  # labels of each token
            result["labels"] = _repeated(table.transpose(-1, -2), size).transpose(-1, -2).contiguous()
        prefix = name.removesuffix(kind)
        for other, tensor in batch.items():
            own = other.startswith(prefix) and not (wide.targets is not None and other in TARGETS)
            own = own and getattr(tensor, "shape", ())[:-1] != ids.shape
            if own and getattr(tensor, "ndim", 0) > 1 and tensor.shape[-1] == ids.shape[-1]:
                # Each place of an image belongs to one: the words behind it are repeated, the places are not.
                result[other] = _continued(tensor, size) if PIXELS in batch else _repeated(tensor, size)
    return result


def _repeated(tensor: Any, width: int) -> Any:
    times = -(-width // tensor.shape[-1])
    return tensor.repeat(*[1] * (tensor.ndim - 1), times)[..., :width].contiguous()


def _continued(tensor: Any, width: int) -> Any:
    import torch

    return torch.cat([tensor, tensor[..., -1:].expand(*tensor.shape[:-1], max(0, width - tensor.shape[-1]))], dim=-1)


def _positions(model: Any) -> int | None:
    """Return the positions of a model that has so many and no more; None where its configuration names no number."""
    positions: Any = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    for name, module in model.named_modules():
        # RoBERTa's and its kin's begin behind the padding's number.
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            return positions - int(module.padding_idx) - 1
    return positions
