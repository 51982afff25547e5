"""index-range: a batch with ids or labels out of range ends in a line that names column, row and value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.patching import OriginalCall, in_lightning
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import TRIED, Guard, then
from hf_mps.layer.guards.kernel_overrides import Kernel
from hf_mps.metal.device import faults

LABELS = ("labels", "label")
IGNORED = -100
LOOKS = 256
"""Lookups and suspected batches that a suspicion lasts: gradients may be accumulated over many fetched ahead."""
# What the modules that hold a table of positions, or of token types, are called in transformers' models.
POSITIONS = ("position_embeddings", "embed_positions", "position_embedding", "wpe")
TYPES = ("token_type_embeddings",)


Where = Callable[..., tuple[Any, int, int | None]]


def _in_rows(table: Any, dim: int, index: Any, *rest: Any) -> tuple[Any, int, None]:
    return index, table.shape[dim] if table.dim() else 1, None


def _in_classes(logits: Any, target: Any, weight: Any, reduction: int, ignored: int) -> tuple[Any, int, int]:
    return target, logits.shape[min(1, logits.dim() - 1)], ignored


# Embeddings end in index_select, cross-entropy in nll_loss; label smoothing and the recipes' loss in chunks gather.
LOOKUPS: dict[str, Where] = {
    "index_select": _in_rows,
    "gather": _in_rows,
    "nll_loss_forward": _in_classes,
    "nll_loss2d_forward": _in_classes,
}


@dataclass(frozen=True)
class Suspect:
    """A value of a batch that no table of the model seems to have a row for; `limit` is the size of that table."""

    column: str
    value: int
    limit: int
    line: str


@dataclass(frozen=True)
class Known:
    """A model that batches go to: the part that has embeddings, and the sizes of its tables that never change.

    `length` is how many tokens its `positions` are enough for: some tables begin behind the padding's place.
    """

    part: ref[Any]
    positions: int | None
    length: int | None
    types: int | None


class IndexRange(Guard):
    """Suspects on the CPU, before a batch is moved, and convicts where the device would read.

    Each batch of Trainer, Accelerate and Lightning is looked at, for a single bad row comes once in an epoch: the
    lowest and highest number of input_ids (any column that ends so), token_type_ids, position_ids and labels, against
    the tables of the models that were prepared, in some ten microseconds a column. What is out of range there may be
    mapped by the script or mean something else, an ignore_index or an image's place: the guard refuses only when such
    a value reaches a lookup or a loss. Until then lookups are watched, by kernels before the device's that are there
    for so long only. Not seen: loops without these three, batches that are no dictionaries, models whose embeddings
    nobody can name.
    """

    name = "index-range"
    what = "ids and labels out of range raise nothing: zeros are read, the loss leaves them out, and training goes on"
    until = "the oldest supported torch is 2.14 and its late error names the place"

    patches = {
        # Batches before they are moved, the models that they go to, and lookups while there is a suspicion.
        **training_hooks.batches("_look"),
        training_hooks.MODEL_PREPARED: then("_prepared"),
        **in_lightning({training_hooks.MODEL_SET_UP: then("_set_up")}),
        **{f"aten::{name}": Kernel("_looks_up", where, late=True) for name, where in LOOKUPS.items()},
    }

    def reset(self) -> None:
        """Also forget the models, and watch no lookups."""
        super().reset()
        self._models: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()
        self._suspects: list[Suspect] = []
        self._cleared: set[tuple[str, int]] = set()
        self._left = 0
        self.release()

    def applies(self) -> Choice[bool]:
        """Whether the device lets such an index pass; from 2.14 on its error comes late, and no trial provokes it."""
        if faults.possible("late-indices"):
            return Choice(True, f"torch {torch.__version__} raises later, without the place (pytorch PR 187109)")
        found = "read without an error"
        try:
            torch.nn.functional.embedding(torch.tensor([2], device="mps"), torch.ones(2, 1, device="mps")).cpu()
        except IndexError:
            found = "an error at once"
        except RuntimeError:
            found = "an error later, without the place"
        return Choice(found != "an error at once", f"{TRIED}: the row behind the last is {found}")

    def _prepared(self, accelerator: Any, model: Any, *_: Any, **__: Any) -> None:
        self._know(model)

    def _set_up(self, strategy: Any, *_: Any, **__: Any) -> None:
        if strategy.model is not None:
            self._know(strategy.model)

    def _know(self, model: Any) -> None:
        part = next((each for each in model.modules() if _rows(each, "get_input_embeddings")), None)
        if part is not None:
            tables: dict[str, Any] = {}
            for name, each in model.named_modules():
                # Of two modules of that name the first, which is the encoder's.
                tables.setdefault(name.rpartition(".")[2], each)
            positions, begin = _first(tables, POSITIONS)
            length = positions - begin if positions else None
            self._models[model] = Known(ref(part), positions, length, _first(tables, TYPES)[0])

    def _look(self, batch: Any) -> Any:
        if self.kernels and not self._suspects:
            self.release()
        if isinstance(batch, Mapping):
            for known in self._models.values():
                part = known.part()
                for column in batch if part is not None else ():
                    self._look_at(column, batch[column], part, known)
        return batch

    def _look_at(self, column: Any, value: Any, part: Any, limits: Known) -> None:
        # A tensor on the CPU of numbers that can be indices.
        numbers = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32) and value.numel() > 0
        if not isinstance(column, str) or not numbers or value.dim() == 0 or value.device.type != "cpu":
            return
        kind = "input_ids" if column.endswith("input_ids") else column
        suspect = None
        if kind == "input_ids":
            suspect = _outside(column, value, _rows(part, "get_input_embeddings"), IDS)
            suspect = suspect or (_too_long(value, limits) if column == kind else None)
        elif kind == "token_type_ids":
            suspect = _outside(column, value, limits.types, TYPE_IDS)
        elif kind == "position_ids":
            suspect = _outside(column, value, limits.positions, POSITION_IDS)
        elif kind in LABELS:
            words = _rows(part, "get_output_embeddings")
            count = getattr(getattr(part, "config", None), "num_labels", None)
            classes = count if isinstance(count, int) and count > 1 else None  # one is a score
            limit, why = (words, WORDS) if words else (classes, CLASSES)
            suspect = _outside(column, value, limit, why, IGNORED)
        if suspect is not None and (column, suspect.limit) not in self._cleared and self.needed:
            if not self._suspects:
                self._left = LOOKS
            self._suspects.append(suspect)
            # Every lookup is looked at from here on, until nothing is suspected any more.
            self.arm(*(f"aten::{name}" for name in LOOKUPS))
            self._count()

    def _looks_up(self, where: Where, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        """Before a lookup: `where` tells the indices, the size of the table and what is ignored."""
        if self._suspects:
            self.judge(*where(*args))
        return stock(*args, **kwargs)

    def judge(self, index: Any, size: int, ignored: int | None) -> None:
        """Refuse indices that the device is about to read with where one is out of range and came with a batch."""
        # It waits for the device, and only while there is a suspicion.
        there = index.detach().cpu()
        wrong = (there < 0) | (there >= size)
        if ignored is not None:
            wrong &= there != ignored
        found = there[wrong].flatten()[:1].tolist()
        guilty = [each for each in self._suspects if each.limit == size or each.value in found] if found else []
        if guilty:
            line = max(guilty, key=lambda each: (each.value in found, each.limit == size)).line
            self._suspects.clear()
            self.acted(line, aloud=False)
            raise UserError(f"{line}; HF_MPS_GUARDS=-{self.name} trains all the same")
        self._count()

    def _count(self) -> None:
        """Let a suspicion end that nothing came of: the script makes something else of such values."""
        self._left -= 1
        if self._left <= 0:
            self._cleared.update((each.column, each.limit) for each in self._suspects)
            self._suspects.clear()


IDS = (
    "the model's embedding has {limit:,} rows: Metal reads zeros there; next: model.resize_token_embeddings("
    "len(tokenizer)), or the tokenizer that belongs to the model"
)
CLASSES = (
    "the model has {limit:,} classes: Metal leaves such rows out of the loss; next: labels from 0 to {last:,} "
    "(num_labels= when the model is loaded), and -100 for what is to be left out"
)
WORDS = (
    "the model chooses from {limit:,} words: Metal leaves such places out of the loss; next: -100 for what is to be "
    "left out, and model.resize_token_embeddings(len(tokenizer)) where words were added"
)
TYPE_IDS = "the model knows {limit:,} token types: Metal reads zeros there; next: token_type_ids from 0 to {last:,}"
POSITION_IDS = "the model has {limit:,} positions: Metal reads zeros there; next: position_ids from 0 to {last:,}"


def _outside(column: str, value: Any, limit: int | None, why: str, ignored: int | None = None) -> Suspect | None:
    """Return the first number of a column that is below zero or from `limit` on, and not `ignored`."""
    if not limit:
        return None
    low, high = torch.aminmax(value)
    if low >= 0 and high < limit:
        return None
    wrong = (value < 0) | (value >= limit)
    if ignored is not None:
        wrong &= value != ignored
    places = wrong.nonzero()[:1].tolist()
    if not places:
        return None
    found = int(value[tuple(places[0])])
    says = f"{column} holds {found:,} in row {places[0][0]} of a batch, and {why.format(limit=limit, last=limit - 1)}"
    return Suspect(column, found, limit, says)


def _too_long(value: Any, known: Known) -> Suspect | None:
    """Rows of more tokens than a model with a table of positions has; it makes the positions itself."""
    length = value.shape[-1]
    if known.positions is None or known.length is None or length <= known.length:
        return None
    says = (
        f"the rows of a batch are {length:,} tokens long, and the model has positions for {known.length:,}: Metal "
        f"reads zeros beyond; next: truncation=True, max_length={known.length} in the tokenizer's call"
    )
    return Suspect("input_ids", length - 1, known.positions, says)


def _rows(part: Any, way: str) -> int | None:
    """The rows of the table that `part.way()` gives, or None where it gives none; models raise what they like there."""
    with suppress(Exception):
        shape = getattr(part, way)().weight.shape
        return int(shape[0]) if len(shape) == 2 else None
    return None


def _first(tables: Mapping[str, Any], names: tuple[str, ...]) -> tuple[int | None, int]:
    """Return the rows of the first table of that name, and from which on they are used."""
    for name in names:
        table = tables.get(name)
        weight = getattr(table, "weight", None)
        if weight is not None and weight.dim() == 2:
            padding = getattr(table, "padding_idx", None)
            return int(weight.shape[0]), int(getattr(table, "offset", 0 if padding is None else padding + 1))
    return None, 0
