"""The endless rows of one reader: pass after pass over its part of every source, drawn by weight, then mixed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.stream import files
from hf_mps.finetune.stream.files import Assignment, Broken, File, FileSlice, Raw, Row, assign, cut

# How many draws between sources are made at once.
DRAWS = 1024
SHOWN = 5
"""Broken rows that are shown."""
LEAST = 10_000
"""The fraction is taken of at least so many rows, so that the first broken row does not end a run."""


BYTES = 64 * 2**20
"""A window ends after so many letters of text, however few rows it has: long documents must not fill the memory."""


class TooManyBroken(Exception):
    """More rows are broken than the recipe allows; the text is one line for a person."""


@dataclass(frozen=True)
class Corpus:
    """One source: its files, and its weight among the sources."""

    files: tuple[File, ...]
    weight: float = 1.0
    name: str = ""

    @cached_property
    def slices(self) -> tuple[FileSlice, ...]:
        """The slices in the order of the files."""
        return cut(self.files)

    def where(self, number: int, behind: int) -> str:
        """Return for a person where the row of slice `number` is that ends at the place `behind`."""
        piece = self.slices[number]
        return files.place_of(self.files[piece.file], piece, behind)


@dataclass(frozen=True)
class Reading:
    """What every reader of a run knows: the sources, the columns by their roles, and how rows are chosen.

    `texts` are the roles that hold text in every row. `hold_out` is the share that is kept for validation, `broken` the
    fraction of rows that may be broken. Two readings with equal fields give equal rows.
    """

    corpora: tuple[Corpus, ...]
    columns: dict[str, str]
    texts: tuple[str, ...]
    seed: int
    hold_out: float | None = None
    broken: float = 0.001

    def row(self, raw: Raw | Broken) -> Row | Broken:
        """Return a row's values by their roles, or what is wrong with it."""
        if isinstance(raw, Broken):
            return raw
        picked = files.pick(raw, self.columns)
        if isinstance(picked, Broken):
            return picked
        for role in self.texts:
            if not isinstance(picked[role], str):
                kind = "nothing" if picked[role] is None else type(picked[role]).__name__
                return Broken(f"has {kind} for data.columns.{role}; allowed: text")
        return picked

    def rows(self, corpus: Corpus) -> Iterator[Row | Broken]:
        """Yield every row of a source in the order of its files, once."""
        for piece in corpus.slices:
            for _, raw in files.read(corpus.files[piece.file], piece, None, tuple(self.columns.values())):
                yield self.row(raw)

    def held(self, row: Row) -> bool:
        """Return whether a row belongs to the validation split: a hash of its values falls into the share `hold_out`.

        The hash is BLAKE2b over the values as JSON with sorted keys: equal rows are on one side in every run, on every
        machine and with any number of processes, whichever file they are in.
        """
        if self.hold_out is None:
            return False
        content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") < self.hold_out * 2**64


@dataclass
class Tally:
    """How many rows were read, and how many of them were broken."""

    rows: int = 0
    broken: int = 0

    def count_broken(self, most: float, where: Callable[[], str], why: str) -> list[str]:
        """Count a broken row; return the line about it, none where SHOWN rows were shown. `where` is slow.

        Raises TooManyBroken where more than the fraction `most` is broken.
        """
        self.broken += 1
        if self.broken > most * max(self.rows, LEAST):
            told = f"{self.broken:,} of {self.rows:,} rows are broken, data.max_bad_row_fraction={most:g} allows fewer"
            raise TooManyBroken(f"{where()} {why}; {told}; next: repair them, or a larger data.max_bad_row_fraction")
        return [f"{where()} {why}"] if self.broken <= SHOWN else []


@dataclass
class Place:
    """Where a reader is in one source: the pass, which of its slices, the place behind the last row, and its number."""

    passed: int = 0
    slice: int = 0
    position: int | None = None
    row: int = 0


@dataclass
class Reader:
    """The endless rows of reader `number` of `readers`: iterate over it, and `state` says where it is."""

    reading: Reading
    number: int
    readers: int
    drawn: int = 0
    places: list[Place] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    told: list[str] = field(default_factory=list)
    """The first broken rows, each with its file and line; they are removed when they are shown."""
    _draws: tuple[int, list[int]] | None = None

    def state(self) -> dict[str, Any]:
        """Return where the reader is, as JSON has it."""
        places = [[place.passed, place.slice, place.position, place.row] for place in self.places]
        return {"drawn": self.drawn, "places": places, "tally": [self.tally.rows, self.tally.broken]}

    def load(self, state: Mapping[str, Any]) -> Reader:
        """Begin at `state`, before the first row is asked for; return self."""
        self.drawn = state["drawn"]
        self.places = [Place(*place) for place in state["places"]]
        self.tally = Tally(*state["tally"])
        return self

    def __iter__(self) -> Iterator[Row]:
        corpora = self.reading.corpora
        self.places = self.places or [Place() for _ in corpora]
        rows = [self._of(number) for number in range(len(corpora))]
        while True:
            row = next(rows[self._draw() if len(corpora) > 1 else 0])
            self.drawn += 1
            yield row

    def where(self, row: Row) -> str:
        """Return for a person where a row of this reader is."""
        source, number, behind = row.place
        return self.reading.corpora[source].where(number, behind)

    def _draw(self) -> int:
        """Return the source of row `drawn`. It depends on the seed, the reader and that row's number alone."""
        import numpy

        # In blocks with a seed each, so that a resumed reader draws one block again and not all before it.
        block, place = divmod(self.drawn, DRAWS)
        if self._draws is None or self._draws[0] != block:
            weights = numpy.array([corpus.weight for corpus in self.reading.corpora])
            generator = numpy.random.default_rng([self.reading.seed, self.number, block])
            self._draws = block, generator.choice(len(weights), DRAWS, p=weights / weights.sum()).tolist()
        return self._draws[1][place]

    def _of(self, source: int) -> Iterator[Row]:
        """Yield the reader's rows of one source, pass after pass."""
        corpus, place = self.reading.corpora[source], self.places[source]
        given = place.slice + place.row  # a resumed pass may have no row left, and is not empty for that
        while True:
            order = f"{self.reading.seed}/{source}/{place.passed}"
            assigned = assign(len(corpus.slices), self.number, self.readers, order)
            for number in assigned.slices[place.slice :]:
                for row in self._slice(corpus, number, assigned, place):
                    row.place = source, number, place.position or 0
                    given += 1
                    yield row
                place.slice, place.position, place.row = place.slice + 1, None, 0
            if not given and self.readers == 1:
                raise UserError(f"{corpus.name}: holds no rows to train on; allowed: at least one")
            if not given:
                told = f"too few rows for {self.readers} readers, reader {self.number + 1} has none"
                remedy = "next: training.dataloader_num_workers=0, or fewer processes"
                raise UserError(f"{corpus.name}: {told}; {remedy}")
            place.passed, place.slice, given = place.passed + 1, 0, 0

    def _slice(self, corpus: Corpus, number: int, assigned: Assignment, place: Place) -> Iterator[Row]:
        piece, columns = corpus.slices[number], tuple(self.reading.columns.values())
        for behind, raw in files.read(corpus.files[piece.file], piece, place.position, columns):
            place.position, place.row = behind, place.row + 1
            if (place.row - 1) % assigned.readers != assigned.remainder:
                continue
            row = self.reading.row(raw)
            self.tally.rows += 1
            if isinstance(row, Broken):
                where = partial(corpus.where, number, behind)
                self.told += self.tally.count_broken(self.reading.broken, where, row.why)
            elif not self.reading.held(row):
                yield row


def validation(reading: Reading, corpora: Sequence[Corpus], most: int, *, held: bool) -> Iterator[Row]:
    """Return at most `most` rows in the order of the files: the held-out ones, or all.

    Broken rows are left out; they are counted where the training reads them.
    """
    rows = (row for corpus in corpora for row in reading.rows(corpus) if not isinstance(row, Broken))
    return islice((row for row in rows if not held or reading.held(row)), most)


class Windows:
    """The rows of `reader` in windows of `size` rows, in an order drawn from the seed, the reader and the window.

    While a window is given the next one is read, a row for a row, so that no batch waits for a whole window. A state is
    where the window began and how many of its rows were given: the rows themselves are read again.
    """

    def __init__(self, reader: Reader, size: int, seed: int, state: Mapping[str, Any] | None = None) -> None:
        self.reader = reader.load(state["reader"]) if state else reader
        self._size = size
        self._seed = seed
        self._number = state["window"] if state else 0
        self._given = state["row"] if state else 0
        self._begun = self.reader.state()

    def state(self) -> dict[str, Any]:
        """Return where the rows are, as JSON has it."""
        return {"window": self._number, "row": self._given, "reader": self._begun}

    def __iter__(self) -> Iterator[Row]:
        rows = iter(self.reader)
        self._begun = self.reader.state()
        window = Filling(self._size)
        while window.filled < 1:
            window.add(next(rows))
        while True:
            following, begun = Filling(self._size), self.reader.state()
            # A resumed window is read whole again, though its first rows were given: its order needs their number.
            order = list(range(len(window.held)))
            random.Random(f"{self._seed}/{self.reader.number}/{self._number}").shuffle(order)
            for place in order[self._given :]:
                self._given += 1
                yield window.held[place]
                if following.filled < 1:
                    following.add(next(rows))
            while following.filled < 1:
                following.add(next(rows))
            window, self._begun = following, begun
            self._number, self._given = self._number + 1, 0


class Filling:
    """What is gathered of up to `rows` rows, or so many `letters` of text."""

    def __init__(self, rows: int, letters: int = BYTES) -> None:
        self.held: list[Any] = []
        self._limits, self._counts = (rows, letters), [0, 0]

    @property
    def filled(self) -> float:
        """The fraction of its size that was taken, 1 and more where it is full."""
        return max(count / limit for count, limit in zip(self._counts, self._limits, strict=True))

    def count(self, row: Row) -> None:
        """Count one more row."""
        self._counts[0] += 1
        self._counts[1] += letters(row)

    def add(self, row: Row) -> None:
        """Count one more row, and hold it."""
        self.count(row)
        self.held.append(row)


def letters(value: Any) -> int:
    """Return how many letters of text a row holds, however deep; another value counts as one."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(letters, value.values()))
    return sum(map(letters, value)) if isinstance(value, list) else 1
