"""Files of lines: plain text, a row a line; and CoNLL's columns, a word and its tags a line, a blank line between
sentences.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.finetune.data import formats
from hf_mps.finetune.data.cache import ROWS, Tables

# CoNLL-2003's line between two documents: it has tags, and is no sentence.
DOCUMENT = "-DOCSTART-"
# CoNLL-U's ids of what is no word: several written as one (8-9), and words that are not written (8.1).
CONLLU, NO_WORD = ".conllu", re.compile(r"\d+[-.]\d+\s")
Sentence = tuple[list[str], list[str]]


def texts(path: Path, name: str) -> Tables:
    """Yield a file's lines without their ends, in the column `text`. Raises UserError for text that is not UTF-8."""
    import pyarrow

    schema = pyarrow.schema([("text", pyarrow.string())])
    with _lines(path, name) as lines:
        while True:
            some = [line.rstrip("\n") for line in islice(lines, ROWS)]
            yield pyarrow.Table.from_arrays([pyarrow.array(some, pyarrow.string())], schema=schema)
            if len(some) < ROWS:
                return


def sentences(path: Path, name: str, roles: dict[str, str], defaults: dict[str, str]) -> Tables:
    """Yield the sentences of a CoNLL file: lists of words and of tags, under the columns that `roles` names.

    Columns are numbered from 0, or backwards from -1, and are separated by tabs or spaces. Where `roles` has
    `defaults`' own name, words are the first column and tags the last. Raises UserError for a line with more or fewer
    columns than the first, and for a name or number that is no column.
    """
    import pyarrow

    kind = pyarrow.list_(pyarrow.string())
    schema = pyarrow.schema([(roles["words"], kind), (roles["tags"], kind)])
    found = _sentences(path, name, roles, defaults)
    while True:
        some = list(islice(found, ROWS))
        columns = [pyarrow.array([sentence[at] for sentence in some], kind) for at in range(2)]
        yield pyarrow.Table.from_arrays(columns, schema=schema)
        if len(some) < ROWS:
            return


def notes(path: Path, name: str, roles: dict[str, str], defaults: dict[str, str]) -> tuple[str, ...]:
    """Say which columns were taken for words and tags. Raises UserError as `sentences`."""
    with _lines(path, name) as lines:
        found = next((columns for line in lines if (columns := _columns(line, name, roles, defaults))), None)
    return (f"words in column {found.words}, tags in column {found.tags} of {found.width}",) if found else ()


@dataclass(frozen=True)
class _Columns:
    """The separator of the columns (None: spaces), their number, and which of them hold words and tags."""

    separator: str | None
    width: int
    words: int
    tags: int


def _columns(line: str, name: str, roles: dict[str, str], defaults: dict[str, str]) -> _Columns | None:
    """Return the columns as the first line with any has them; None for an empty line and a comment before it.

    Raises UserError where a column is missing, or words and tags are one.
    """
    separator = "\t" if "\t" in line else None
    if not line.strip() or line.split()[0] == DOCUMENT or (line.startswith("# ") and "=" in line):  # "# id = 1"
        return None
    width = len(line.rstrip("\n").split(separator))
    places = {"words": 0, "tags": width - 1}
    for role in places:
        said = roles[role]
        if said == defaults[role]:
            continue
        number = int(said) if said.removeprefix("-").isdecimal() else None
        if number is None or not -width <= number < width:
            shown = f"0 to {width - 1}, or -1 for the last" if width > 1 else "0"
            told = f"there is no column '{said}' for data.columns.{role}; a CoNLL file's columns have numbers: {shown}"
            raise UserError(f"{name}: {told}")
        places[role] = number % width
    if places["words"] == places["tags"]:
        told = f"column {places['words']} of {width} would be both words and tags"
        raise UserError(f"{name}: {told}; next: data.words=NUMBER data.tags=NUMBER, or a line for each word")
    return _Columns(separator, width, places["words"], places["tags"])


def _sentences(path: Path, name: str, roles: dict[str, str], defaults: dict[str, str]) -> Iterator[Sentence]:
    words: list[str] = []
    tags: list[str] = []
    columns: _Columns | None = None
    numbered = formats.ending(path) == CONLLU
    with _lines(path, name) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                if words:
                    yield words, tags
                words, tags = [], []
                continue
            columns = columns or _columns(line, name, roles, defaults)
            if columns is None or line.split()[0] == DOCUMENT or (numbered and NO_WORD.match(line)):
                continue
            fields = line.rstrip("\n").split(columns.separator)
            if len(fields) != columns.width:
                if not words and line.startswith("# "):
                    continue
                told = f"line {number} has {counted(len(fields), 'column')} and the first {columns.width}"
                raise UserError(f"{name}: {told}; allowed: as many in each, an empty line between sentences")
            words.append(fields[columns.words])
            tags.append(fields[columns.tags])
    if words:
        yield words, tags


@contextmanager
def _lines(path: Path, name: str) -> Iterator[Iterator[str]]:
    """Open a file as lines that end in "\n", without a byte order mark. Raises UserError for text that is not UTF-8."""
    try:
        with formats.opened(path, name) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            yield iter(text)
    except UnicodeDecodeError as error:
        raise formats.not_text(path, name) from error
