"""From mixed rows to full batches: tokenised a group at a time, then by like length, packed or as blocks come."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.stream.endless import BYTES, Filling, Tally, Windows
from hf_mps.finetune.stream.files import Broken, Row
from hf_mps.finetune.text import buckets, packing

Example = dict[str, Any]
"""The model's columns of one example, as Python numbers."""
Encoded = list[Example] | Broken
Pack = Callable[[list[Example]], list[list[Example]]]
"""What a row becomes: an example, or none, or several, or why it cannot be used."""

ALIKE, PACKED, PLAIN = 32, 16, 4
"""Batches of a group: among so many are the rows sought that have one length, or fill a packed row together."""
LETTERS = 4
"""About the letters of a token: how much text makes a group of long rows."""


@dataclass(frozen=True)
class Making:
    """How a task makes examples of rows.

    `encode` returns for each row what it becomes. `longest` is the most tokens of an example. `joined` says that the
    texts are one long text: then `encode` gives each row's tokens, which are cut into blocks of `longest` between the
    tokens `before` and `after`. `pack` groups examples into rows of at most `longest` tokens, which are filled up with
    `filler`, see text/packing.py.
    """

    encode: Callable[[Sequence[Row]], list[Encoded]]
    longest: int
    joined: bool = False
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    pack: Pack | None = None
    filler: int = 0


@dataclass(frozen=True)
class Arranging:
    """How examples become batches of `size`; `target` is the length that a row is padded to, for `grouped` ones."""

    size: int
    grouped: bool = False
    target: Callable[[int], int] = int
    seed: int = 0


@dataclass
class Batch:
    """The examples of a batch, and all that a checkpoint needs to go on behind it.

    `state` is where the batch's group began, None where an earlier batch of the group brought it; `given` is the number
    of this one in its group, from 1 on. `told` are broken rows to be shown.
    """

    examples: list[Example]
    given: int
    state: dict[str, Any] | None
    tally: Tally
    told: list[str] = field(default_factory=list)


class Batches:
    """The endless batches of one reader, from `state` on.

    A group of rows is tokenised, put into full batches, and what is left goes into the next group. While a group's
    batches are given the next group is tokenised, a part for each batch, so that no batch waits for a whole group. A
    state is where the group began, with what was left of the group before, and how many of its batches were given.
    """

    def __init__(
        self, windows: Windows, making: Making, arranging: Arranging, state: Mapping[str, Any] | None = None
    ) -> None:
        state = state or {}
        self._windows, self._making, self._arranging = windows, making, arranging
        self._examples: list[Example] = state.get("examples", [])
        """Those of the group before that made no full batch."""
        self._tokens: list[int] = state.get("tokens", [])
        """Those behind its last block."""
        self._number: int = state.get("group", 0)
        self._refused: int = state.get("refused", 0)
        self._skip: int = state.get("batch", 0)
        self._size: int = state.get("size", arranging.size)
        """Rows of a batch when the group was made: another number of processes may have others now."""

    def _state(self) -> dict[str, Any]:
        left = {"examples": self._examples, "tokens": self._tokens}
        group = {"group": self._number, "refused": self._refused, "size": self._size}
        return {**self._windows.state(), **left, **group}

    def __iter__(self) -> Iterator[Batch]:
        rows, reader = iter(self._windows), self._windows.reader
        state = self._state()
        group = self._group()
        self._take(group, rows, 1.0)
        while True:
            batches, self._examples, self._tokens = self._assembled(group)
            skipped, self._skip = min(self._skip, len(batches)), 0
            if self._size != self._arranging.size:
                # A run that goes on with batches of another size: what was left of the group comes first in the next.
                self._examples = [example for batch in batches[skipped:] for example in batch] + self._examples
                batches, self._size = [], self._arranging.size
            self._number += 1
            here: dict[str, Any] | None = state
            state, group = self._state(), self._group()
            for number, examples in enumerate(batches[skipped:], skipped + 1):
                told, reader.told = reader.told, []
                yield Batch(examples, number, here, Tally(reader.tally.rows, reader.tally.broken + self._refused), told)
                here = None
                self._take(group, rows, number / len(batches))
            self._take(group, rows, 1.0)

    def _group(self) -> Filling:
        """Return an empty group of the size that the way of making batches asks for."""
        making, arranging = self._making, self._arranging
        if making.joined or making.pack is not None:
            batches = PLAIN if making.joined else PACKED
            return Filling(BYTES, batches * self._size * making.longest * LETTERS)
        return Filling((ALIKE if arranging.grouped else PLAIN) * self._size, BYTES)

    def _take(self, group: Filling, rows: Iterator[Row], part: float) -> None:
        """Tokenise rows into `group` until the fraction `part` of its size is there."""
        some = []
        while group.filled < part:
            some.append(next(rows))
            group.count(some[-1])
        reader = self._windows.reader
        for row, made in zip(some, self._making.encode(some) if some else (), strict=True):
            if isinstance(made, Broken):
                known = Tally(reader.tally.rows, reader.tally.broken + self._refused)
                reader.told += known.count_broken(reader.reading.broken, partial(reader.where, row), made.why)
                self._refused += 1
            else:
                group.held += made

    def _assembled(self, group: Filling) -> tuple[list[list[Example]], list[Example], list[int]]:
        """Return the full batches of a group with what was left before, and the examples and tokens left now."""
        making, arranging, size = self._making, self._arranging, self._size
        examples, tokens = group.held, self._tokens
        if making.joined:
            examples, tokens = blocks([*tokens, *(token for one in examples for token in one["input_ids"])], making)
        examples = self._examples + examples
        seed = f"{arranging.seed}/{self._windows.reader.number}/{self._number}"
        if making.pack is not None:
            # The emptiest rows are left for the next group, where their examples fit beside others.
            rows = sorted(making.pack(examples), key=lambda row: -sum(len(one["input_ids"]) for one in row))
            cut = len(rows) // size * size
            full, emptiest = rows[:cut], [one for row in rows[cut:] for one in row]
            random.Random(seed).shuffle(full)
            joined = [packing.joined_row(row, making.longest, making.filler) for row in full]
            return [joined[at : at + size] for at in range(0, cut, size)], emptiest, []
        if arranging.grouped:
            keys = [buckets.bucket(arranging.target(len(one["input_ids"]))) for one in examples]
            places, rest = buckets.full_batches(keys, range(len(examples)), size)
            places.sort(key=lambda batch: max(keys[place] for place in batch))
            # In the same order of lengths on every rank, or each step would wait for the rank with the longest batch.
            slots = list(range(ALIKE))
            random.Random(f"{arranging.seed}/{self._number}").shuffle(slots)
            order = sorted(range(len(places)), key=lambda place: slots[place * ALIKE // len(places)])
            return [[examples[at] for at in places[place]] for place in order], [examples[at] for at in rest], []
        cut = len(examples) // size * size
        return [examples[at : at + size] for at in range(0, cut, size)], examples[cut:], tokens


def by_rows(encode: Callable[..., Mapping[str, Sequence[Any]]]) -> Callable[[Sequence[Row]], list[Encoded]]:
    """Return a task's `encode(columns, indices)` as a stream calls it; a row that it refuses is broken."""

    def made(rows: Sequence[Row]) -> list[Encoded]:
        try:
            columns = encode({role: [row[role] for row in rows] for role in rows[0]}, range(len(rows)))
        except UserError as error:
            if len(rows) > 1:
                return [one for row in rows for one in made([row])]
            return [Broken(f"cannot be used: {error}")]
        return [[dict(zip(columns, values, strict=True))] for values in zip(*columns.values(), strict=True)]

    return made


def blocks(tokens: list[int], making: Making) -> tuple[list[Example], list[int]]:
    """Cut tokens into blocks of `longest`, special tokens around each; return them and the tokens left."""
    size = making.longest - len(making.before) - len(making.after)
    cut = len(tokens) // size * size
    made = [{"input_ids": [*making.before, *tokens[at : at + size], *making.after]} for at in range(0, cut, size)]
    return made, tokens[cut:]
