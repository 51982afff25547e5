"""The endless rows of one reader: pass after pass over its share of every source, each row by its weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.finetune.stream import readers, slices
from hf_mps.finetune.stream.files import File
from hf_mps.finetune.stream.readers import Broken, Raw, Row

# How many draws between sources are made at once.
DRAWS = 1024
SHOWN = 5
"""Broken rows that are shown."""
LEAST = 10_000
"""Rows that the stated share of broken ones is taken of at the least, so that the first of them does not end a run."""


class TooManyBroken(Exception):
    """More rows are broken than the recipe allows; the text is one line for a person."""


@dataclass(frozen=True)
class Corpus:
    """One source: its files, the pieces that they are read in, and its weight among the sources."""

    files: tuple[File, ...]
    weight: float = 1.0
    name: str = ""

    @cached_property
    def units(self) -> tuple[slices.FileSlice, ...]:
        """The pieces in the order of the files."""
        return slices.cut(self.files)


@dataclass(frozen=True)
class Reading:
    """What every reader of a run knows: the sources, the columns by their roles, and how rows are chosen.

    `texts` are the roles that hold text in every row. `hold_out` is the share that is kept for validation, `broken` the
    share of rows that may be broken. Two readings with equal fields give equal rows.
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
        picked = readers.pick(raw, self.columns)
        if isinstance(picked, Broken):
            return picked
        for role in self.texts:
            if not isinstance(picked[role], str):
                kind = "nothing" if picked[role] is None else type(picked[role]).__name__
                return Broken(f"has {kind} for data.columns.{role}; allowed: text")
        return picked

    def held(self, row: Row) -> bool:
        """Whether a row belongs to the validation split: a hash of its values falls into the share `hold_out`.

        The hash is BLAKE2b over the values as JSON with sorted keys: equal rows stand on one side, in every run, on
        every machine and in every number of processes, wherever the row lies.
        """
        if self.hold_out is None:
            return False
        content = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str).encode()
        number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")
        return number < self.hold_out * 2**64


@dataclass
class Tally:
    """How many rows were read, and how many of them were broken."""

    rows: int = 0
    broken: int = 0

    def one_broken(self, share: float, told: Callable[[], str]) -> str | None:
        """Count a broken row; return what `told` says of it where it is one to show.

        Raises TooManyBroken where more than `share` are broken.
        """
        self.broken += 1
        over = self.broken > share * max(self.rows, LEAST)
        if over:
            raise TooManyBroken(
                f"{told()}; {self.broken:,} of {self.rows:,} rows are broken, more than"
                f" data.max_bad_row_fraction={share:g} allows; next: repair them, or a larger data.max_bad_row_fraction"
            )
        return told() if self.broken <= SHOWN else None


@dataclass
class Place:
    """Where a reader is in one source: the pass, which of its units, the place behind the last row, and its number."""

    passed: int = 0
    unit: int = 0
    position: int | None = None
    row: int = 0


@dataclass
class Reader:
    """The rows of reader `number` of `lanes`, endless: iterate over it, and `state` says where it is."""

    reading: Reading
    number: int
    lanes: int
    drawn: int = 0
    places: list[Place] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    told: list[str] = field(default_factory=list)
    """The first broken rows, each with its file and line; whoever shows them takes them away."""
    _draws: tuple[int, list[int]] | None = None

    def state(self) -> dict[str, Any]:
        """Where the lane is, as JSON has it."""
        return {
            "drawn": self.drawn,
            "places": [[place.passed, place.unit, place.position, place.row] for place in self.places],
            "tally": [self.tally.rows, self.tally.broken],
        }

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
        """Return where a row of this lane lies, for a person."""
        number, unit, behind = row.place
        corpus = self.reading.corpora[number]
        return readers.place_of(corpus.files[corpus.units[unit].file], corpus.units[unit], behind)

    def _draw(self) -> int:
        """Return the source of row `drawn`: a number that depends on the seed, the lane and that row's number alone."""
        import numpy

        block, place = divmod(self.drawn, DRAWS)
        if self._draws is None or self._draws[0] != block:
            weights = numpy.array([corpus.weight for corpus in self.reading.corpora])
            generator = numpy.random.default_rng([self.reading.seed, self.number, block])
            self._draws = block, generator.choice(len(weights), DRAWS, p=weights / weights.sum()).tolist()
        return self._draws[1][place]

    def _of(self, number: int) -> Iterator[Row]:
        """Yield the lane's rows of one source, again and again."""
        corpus, place = self.reading.corpora[number], self.places[number]
        given = place.unit + place.row  # of a pass that goes on
        while True:
            order = f"{self.reading.seed}/{number}/{place.passed}"
            share = slices.share(len(corpus.units), self.number, self.lanes, order)
            for unit in share.units[place.unit :]:
                for row in self._unit(corpus, corpus.units[unit], share, place):
                    row.place = number, unit, place.position or 0
                    given += 1
                    yield row
                place.unit, place.position, place.row = place.unit + 1, None, 0
            if not given:
                raise UserError(self._nothing(corpus, place))
            place.passed, place.unit, given = place.passed + 1, 0, 0

    def _unit(self, corpus: Corpus, unit: slices.FileSlice, share: slices.Assignment, place: Place) -> Iterator[Row]:
        file, columns = corpus.files[unit.file], tuple(self.reading.columns.values())
        for behind, raw in readers.read(file, unit, place.position, columns):
            place.position, place.row = behind, place.row + 1
            if (place.row - 1) % share.readers != share.remainder:
                continue
            row = self.reading.row(raw)
            self.tally.rows += 1
            if isinstance(row, Broken):
                said = partial(_said, file, unit, behind, row.why)
                self.told += filter(None, [self.tally.one_broken(self.reading.broken, said)])
            elif not self.reading.held(row):
                yield row

    def _nothing(self, corpus: Corpus, place: Place) -> str:
        """Say why a pass had no row for this lane."""
        if self.lanes == 1:
            return f"{corpus.name}: holds no rows to train on; allowed: at least one"
        return (
            f"{corpus.name}: too few rows for {self.lanes} readers, reader {self.number + 1} has none; next:"
            " training.dataloader_num_workers=0, or fewer processes"
        )


def _said(file: File, unit: slices.FileSlice, behind: int, why: str) -> str:
    return f"{readers.place_of(file, unit, behind)} {why}"


def validation(reading: Reading, corpora: Sequence[Corpus], most: int, *, held: bool) -> Iterator[Row]:
    """Yield at most `most` rows in the order of the files: the held-out ones, or all.

    Broken rows are left out; they are counted where the training reads them.
    """
    given = 0
    for corpus in corpora:
        for unit in corpus.units:
            file = corpus.files[unit.file]
            for _, raw in readers.read(file, unit, None, tuple(reading.columns.values())):
                row = reading.row(raw)
                if isinstance(row, Broken) or (held and not reading.held(row)):
                    continue
                yield row
                given += 1
                if given == most:
                    return
