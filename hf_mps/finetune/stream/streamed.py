"""A recipe's streamed rows: a sample of the training rows, from which all is decided, and the validation rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.core.text import counted
from hf_mps.finetune.data import formats
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.stream import endless, files
from hf_mps.finetune.stream.files import File

if TYPE_CHECKING:
    from datasets import Dataset

SAMPLE = 1000
"""Rows that lengths, labels and columns are decided from."""
VALIDATION = 1000
"""Validation rows that are kept where the recipe does not say."""


@dataclass(frozen=True)
class Stream:
    """Where the training rows come from, and how many are mixed at a time; `reading` chooses and names them."""

    reading: endless.Reading
    buffer: int

    @property
    def files(self) -> list[File]:
        """The files of all sources."""
        return [file for corpus in self.reading.corpora for file in corpus.files]

    @property
    def digest(self) -> str:
        """A digest of which files there are: their names, sizes and stamps, not their content."""
        listed = repr([(Path(file.url).name, file.size, file.stamp) for file in self.files])
        return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(file.size for file in self.files)

    def __str__(self) -> str:
        size = f"{self.bytes / 1e9:,.1f} GB" if self.bytes >= 1e8 else f"{self.bytes / 1e6:,.1f} MB"
        return f"{counted(len(self.files), 'file')}, {size}"


def check(data: schema.Data) -> None:
    """Refuse paths that lead to no file before anything heavy is imported. Raises UserError."""
    named = {f"data.files.{split}": name for split, name in (data.files or {}).items()}
    for number, source in enumerate(data.sources or ()):
        if source.files is not None:
            named[f"data.sources[{number}].files"] = source.files
    for key, name in named.items():
        files.check(name, key)
        if not data.header and formats.kind(Path(name)) not in ("csv", "tsv"):
            raise UserError(f"{key}: {name}: data.header is for tables; allowed: .csv, .tsv")


def load(data: schema.Data, seed: int, texts: Sequence[str], splits: Sequence[str]) -> dict[str, Rows]:
    """Return the rows of each of `splits`: of `train` a sample with its stream, of others at most `data.rows` says.

    `texts` are the roles that hold text. Raises UserError for files that cannot be read, a column that is not there, a
    split without rows.
    """
    from datasets import Dataset, Features

    columns = data.columns.roles()
    corpora = {split: _corpora(data, split) for split in splits}
    asked = tuple(role for role in columns if role in texts)
    reading = endless.Reading(corpora["train"], columns, asked, seed, data.hold_out, data.max_bad_row_fraction)
    sample: list[files.Row] = []
    for corpus in reading.corpora:  # as many rows of each source
        rows = list(islice(_usable(reading, corpus), -(-SAMPLE // len(reading.corpora))))
        if not rows:
            raise UserError(_unusable(reading, corpus))
        sample += rows
    kinds = dict(Dataset.from_list([dict(row) for row in sample]).features)
    first = reading.corpora[0].files[0]
    if first.kind == "parquet":  # it states the types of columns, and their class names
        stated = Features.from_arrow_schema(_schema(first))
        kinds |= {role: stated[column] for role, column in columns.items() if column in stated}
    where = "; ".join(corpus.name for corpus in reading.corpora)
    stream = Stream(reading, data.shuffle_buffer)
    folder = Path(reading.corpora[0].files[0].url).parent
    textual = all(file.kind in ("csv", "tsv") for corpus in reading.corpora for file in corpus.files)
    found = {"train": Rows(_dataset(sample, kinds), where, textual, folder=folder, stream=stream)}
    most = data.rows.validation or VALIDATION
    for split, of in corpora.items():
        if split != "train":
            rows = list(endless.validation(endless.Reading(of, columns, asked, seed), of, most, held=False))
            found[split] = _evaluated(rows, kinds, "; ".join(corpus.name for corpus in of), most, textual)
    if data.hold_out is not None:
        rows = list(endless.validation(reading, reading.corpora, most, held=True))
        found["validation"] = _evaluated(rows, kinds, f"{where} (held out by a hash of the row)", most, textual)
    return found


def _corpora(data: schema.Data, split: str) -> tuple[endless.Corpus, ...]:
    """Return the sources of a split with their files. Raises UserError where one has none."""
    if data.sources:
        sources = [(f"data.sources[{number}]", source) for number, source in enumerate(data.sources)]
    elif data.files:
        sources = [(f"data.files.{split}", schema.Source(files=data.files[split]))]
    else:
        there = (data.splits or {}).get(split, split)
        sources = [("data.hub", schema.Source(hub=data.hub, config=data.config, revision=data.revision, split=there))]
    corpora = []
    for key, source in sources:
        name = source.files or " ".join(filter(None, (source.hub, source.config, source.split)))
        named = files.of_pattern(name, key, header=data.header) if source.files else files.of_hub(source, key)
        kept = tuple(file for file in named if file.size)
        if not kept:
            raise UserError(f"{key}: {name}: every file is empty; allowed: at least one row")
        corpora.append(endless.Corpus(kept, source.weight, name))
    return tuple(corpora)


def _usable(reading: endless.Reading, corpus: endless.Corpus) -> Iterator[files.Row]:
    """Yield the rows of a source that are trained on, until SAMPLE rows of it were broken."""
    broken = 0
    for row in reading.rows(corpus):
        broken += isinstance(row, files.Broken)
        if broken > SAMPLE:
            return
        if not isinstance(row, files.Broken) and not reading.held(row):
            yield row


def _unusable(reading: endless.Reading, corpus: endless.Corpus) -> str:
    """Say why no row of a source can be used: a column that none has, or what is wrong with the first."""
    piece = corpus.slices[0]
    file = corpus.files[piece.file]
    every = files.read(file, piece, None, _schema(file).names if file.kind == "parquet" else ())
    first = next((row for _, row in every if not isinstance(row, files.Broken)), None)
    available = list(first or ())
    for role, column in reading.columns.items():
        if first is not None and isinstance(files.pick(first, {role: column}), files.Broken):
            known = ", ".join(map(brief, available))
            way_on = nearest(column, available) or f"; next: name the one that it is with data.columns.{role}"
            told = f"there is no column '{column}' for data.columns.{role}; the columns are {known}"
            return f"{corpus.name}: {told}{way_on}"
    for behind, raw in files.read(file, piece, None, tuple(reading.columns.values())):
        row = reading.row(raw)
        if isinstance(row, files.Broken):
            return f"{corpus.where(0, behind)} {row.why}, and no row can be used; next: correct it there"
    return f"{corpus.name}: holds no rows; allowed: at least one"


def _schema(file: File) -> Any:
    with file.opened() as opened, formats.opened_parquet(opened, file.url) as table:
        return table.schema_arrow


def _dataset(rows: Sequence[Mapping[str, Any]], kinds: Mapping[str, Any]) -> Dataset:
    from datasets import Dataset, Features

    return Dataset.from_list([dict(row) for row in rows], features=Features(kinds))


def _evaluated(rows: Sequence[files.Row], kinds: Mapping[str, Any], where: str, most: int, textual: bool) -> Rows:
    """Return the rows of a split that is measured. Raises UserError where there is none."""
    if not rows:
        raise UserError(f"{where}: holds no rows; allowed: at least one; next: a larger data.hold_out, or more rows")
    notes = (f"the first {most:,}; data.rows.validation=N for another number",) if len(rows) == most else ()
    return Rows(_dataset(rows, kinds), where, textual, notes=notes)
