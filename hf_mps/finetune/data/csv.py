"""Files of separated values, csv and tsv: read by Python's own csv module, every row with as many fields as the first.

pandas, which `datasets` reads a csv with, makes an index of the first fields where rows are longer than the header, and
fills up rows that are shorter; both lose what a person wrote without a word.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Literal

from hf_mps.core.errors import UserError, brief
from hf_mps.core.text import counted
from hf_mps.finetune.data import formats
from hf_mps.finetune.data.cache import ROWS, Tables

SEPARATORS = {"csv": (",", ";", "\t"), "tsv": ("\t",)}
# The rows that a separator is told from where there is no header.
LOOKED_AT = 50
# A line of our own behind the last: whatever swallows it is a quotation mark that was never closed.
END = "hf-mps-end-7c1d20f4"
CUT_OFF = "ends without a line break: is its last row whole?"


@dataclass(frozen=True)
class Shape:
    """How a file is written: what separates its `columns`, and whether a space stands behind each separator.

    A tab-separated file has no quoting (IANA text/tab-separated-values): GLUE's hold lone quotation marks.
    """

    separator: str
    columns: tuple[str, ...]
    spaced: bool = False
    quoted: bool = True
    header: bool = True

    def reader(self, lines: Iterable[str], *, strict: bool = False) -> Iterator[list[str]]:
        """Python's reader of these lines; its `line_num` counts them. `strict`: no letter behind a closing quote."""
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.separator, skipinitialspace=self.spaced, quoting=quoting, strict=strict)


def tables(path: Path, name: str, *, header: bool = True) -> Tables:
    """The rows of a csv or tsv, every value as text; without a `header` the columns are called 0, 1, 2 and so on.

    Raises UserError for text that is not UTF-8, columns without names or with one name, a row with more or fewer fields
    than the first, and a quotation mark that is never closed.
    """
    import pyarrow

    shape = _shape(path, name, header)
    schema = pyarrow.schema([(column, pyarrow.string()) for column in shape.columns])
    rows = _rows(path, name, shape)
    while True:
        with _long_fields():
            some = list(islice(rows, ROWS))
        columns = [pyarrow.array(column, pyarrow.string()) for column in zip(*some, strict=True)]
        yield pyarrow.Table.from_arrays(columns or [[] for _ in schema], schema=schema)
        if len(some) < ROWS:
            return


def notes(path: Path) -> tuple[str, ...]:
    """What a person may want to look at though the file can be read: a last row that is perhaps cut off."""
    if formats.packed(path):  # gzip has a checksum at its end: a file that is cut off cannot be unpacked
        return ()
    with path.open("rb") as file:
        if file.seek(0, io.SEEK_END) == 0:
            return ()
        file.seek(-1, io.SEEK_END)
        return () if file.read(1) in b"\r\n" else (CUT_OFF,)


def _shape(path: Path, name: str, header: bool) -> Shape:
    """How the file is written, told from its first row, or from the first rows where it has no header."""
    kind = formats.kind(path) or "csv"
    quoted = kind == "csv"
    count = 1 if header else LOOKED_AT
    found = {
        separator: _first(path, name, Shape(separator, (), quoted=quoted), count) for separator in SEPARATORS[kind]
    }
    # Spreadsheets of countries that write 0,5 save a csv with semicolons.
    several = [one for one, (rows, _) in found.items() if rows and len(rows[0]) > 1]
    alike = [one for one in several if len({len(row) for row in found[one][0]}) == 1]
    clean = [one for one in alike if found[one][1]]
    separator = [*clean, *alike, *several, SEPARATORS[kind][0]][0]
    rows, _ = found[separator]
    spaced = bool(rows) and len(rows[0]) > 1 and all(field.startswith(" ") for row in rows for field in row[1:])
    made = Shape(separator, (), spaced, quoted, header)
    with _lines(path, name) as lines, _long_fields(), _told(name):
        first = next((row for row in made.reader(lines) if row), [])
    columns = named(first, name) if header else tuple(map(str, range(len(first))))
    return Shape(separator, columns, spaced, quoted, header)


def _first(path: Path, name: str, shape: Shape, count: int) -> tuple[list[list[str]], bool]:
    """The first rows that are not empty, and whether every quotation mark in them stands where it belongs.

    One that does not tells that another separator is the right one: commas within the texts of `"a";"b, c"`.
    """
    with _long_fields():
        for strict in (True, False):
            with _lines(path, name) as lines, _told(name) if not strict else suppress(csv.Error):
                return list(islice((row for row in shape.reader(lines, strict=strict) if row), count)), strict
    raise AssertionError("the reader that is not strict returned nothing")


def named(first: list[str], name: str) -> tuple[str, ...]:
    """The columns that a first line names; one without a name is called as pandas calls it. Raises UserError."""
    twice = [column for column in first if column and first.count(column) > 1]
    if twice:
        raise UserError(f"{name}: its first line names the column '{brief(twice[0])}' twice; allowed: each once")
    if not any(column.strip() for column in first):
        raise UserError(f"{name}: its first line names no columns; allowed: a name for each")
    return tuple(column or f"Unnamed: {place}" for place, column in enumerate(first))


def _rows(path: Path, name: str, shape: Shape) -> Iterator[list[str]]:
    """Each row behind the header, its fields counted; lines without anything are left out."""
    width, row, begun = len(shape.columns), 0 if shape.header else 1, 1
    with _lines(path, name) as lines, _told(name):
        reader = shape.reader(chain(lines, [END]))
        for fields in reader:
            if fields and fields[-1].endswith(END) and fields != [END]:
                place = f"row {row}" if row else "the first line"
                raise UserError(
                    f"{name}: the quotation mark that opens in {place} is never closed; next: close it there"
                )
            if fields == [END]:
                return
            empty = not fields or (width > 1 and len(fields) == 1 and not fields[0].strip())
            if not empty and row:
                if len(fields) != width:
                    raise _ragged(path, name, shape, fields, row, begun)
                yield fields
            row += not empty
            begun = reader.line_num + 1  # type: ignore[attr-defined]  # csv.reader's own counter


def _ragged(path: Path, name: str, shape: Shape, fields: list[str], row: int, line: int) -> UserError:
    """The error for a row with more or fewer fields than there are columns."""
    first = "the header" if shape.header else "row 1"
    counts = f"{counted(len(fields), 'field')} and {first} {len(shape.columns)}"
    with _lines(path, name) as lines:
        last = next(islice(lines, line - 1, None), "")
        whole = last.endswith(("\n", "\r")) or next(lines, None) is not None
    if len(fields) < len(shape.columns) and not whole:
        return UserError(f"{name}: the file ends in the middle of row {row}, which has {counts}; next: fetch it again")
    allowed = "as many in each, a text with a separator inside in quotation marks"
    return UserError(f"{name}: row {row} (line {line}) has {counts}; allowed: {allowed}")


@contextmanager
def _lines(path: Path, name: str) -> Iterator[Iterator[str]]:
    """The lines of a file with their ends, a byte order mark taken off. Raises UserError for what is no UTF-8 text."""
    try:
        with formats.opened(path, name) as file, _text(file) as text:
            yield _without_nul(text, name)
    except UnicodeDecodeError as error:
        raise formats.not_text(path, name) from error


def _text(file: IO[bytes]) -> io.TextIOWrapper:
    return io.TextIOWrapper(file, encoding="utf-8-sig", newline="")


def _without_nul(lines: Iterable[str], name: str) -> Iterator[str]:
    """The lines, of which none holds a NUL: Python's reader refuses it until 3.10 and takes it for a letter since."""
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise UserError(f"{name}: line {number} holds a NUL character; allowed: text without, saved as UTF-8")
        yield line


@contextmanager
def _told(name: str) -> Iterator[None]:
    """What Python's reader says of a file, in one line."""
    try:
        yield
    except csv.Error as error:
        raise UserError(
            f"{name}: cannot be read as separated values: {error}; allowed: csv as RFC 4180 has it"
        ) from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """No limit on a field's length for a while; the limit is the process's own, and other readers keep theirs."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)
