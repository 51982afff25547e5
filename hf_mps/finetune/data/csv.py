"""Separated values, csv and tsv: read by Python's own csv module, every row with as many fields as the first.

pandas, with which `datasets` reads a csv, makes an index of the first fields where rows are longer than the header, and
fills up shorter rows: both lose data without a word.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Literal

from hf_mps.core.errors import UserError, brief
from hf_mps.core.text import counted
from hf_mps.finetune.data import formats
from hf_mps.finetune.data.cache import ROWS, Tables

SEPARATORS = {"csv": (",", ";", "\t"), "tsv": ("\t",)}
# How many rows tell the separator where there is no header.
LOOKED_AT = 50
# A line added behind the last: only an unclosed quotation mark swallows it.
END = "hf-mps-end-7c1d20f4"
CUT_OFF = "ends without a line break: is its last row whole?"


@dataclass(frozen=True)
class Shape:
    """How a file is written: its separator and `columns`, and whether a space follows each separator.

    A tab-separated file has no quoting (IANA text/tab-separated-values): GLUE's hold lone quotation marks.
    """

    separator: str
    columns: tuple[str, ...]
    spaced: bool = False
    quoted: bool = True
    header: bool = True

    def reader(self, lines: Iterable[str], *, strict: bool = False) -> Iterator[list[str]]:
        """Return Python's reader of these lines; its `line_num` counts them. `strict` forbids text behind a closing
        quote.
        """
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.separator, skipinitialspace=self.spaced, quoting=quoting, strict=strict)


def tables(path: Path, name: str, *, header: bool = True) -> Tables:
    """Yield the rows of a csv or tsv, every value as text; without a `header` the columns are called 0, 1, 2 and so on.

    Raises UserError for text that is not UTF-8, unnamed or repeated columns, a row with more or fewer fields than the
    first, and a quotation mark that is never closed.
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
    """Return what a person may want to check in a readable file: a last row that may be cut off."""
    if formats.packed(path):  # gzip has a checksum at its end: a file that is cut off cannot be unpacked
        return ()
    with path.open("rb") as file:
        if file.seek(0, io.SEEK_END) == 0:
            return ()
        file.seek(-1, io.SEEK_END)
        return () if file.read(1) in b"\r\n" else (CUT_OFF,)


def _shape(path: Path, name: str, header: bool) -> Shape:
    """Return how the file is written, from its first row, or from the first rows where it has no header."""
    kind = formats.kind(path) or "csv"
    quoted = kind == "csv"
    count = 1 if header else LOOKED_AT
    found = {
        separator: _first_rows(path, name, Shape(separator, (), quoted=quoted), count) for separator in SEPARATORS[kind]
    }
    # Spreadsheets in countries that write 0,5 save csv with semicolons.
    several = [one for one, (rows, _) in found.items() if rows and len(rows[0]) > 1]
    alike = [one for one in several if len({len(row) for row in found[one][0]}) == 1]
    clean = [one for one in alike if found[one][1]]
    separator = [*clean, *alike, *several, SEPARATORS[kind][0]][0]
    rows, _ = found[separator]
    spaced = bool(rows) and len(rows[0]) > 1 and all(field.startswith(" ") for row in rows for field in row[1:])
    made = Shape(separator, (), spaced, quoted, header)
    with _lines(path, name) as lines, _long_fields(), _readable_errors(name):
        first = next((row for row in made.reader(lines) if row), [])
    columns = column_names(first, name) if header else tuple(map(str, range(len(first))))
    return Shape(separator, columns, spaced, quoted, header)


def _first_rows(path: Path, name: str, shape: Shape, count: int) -> tuple[list[list[str]], bool]:
    """Return the first rows that are not empty, and whether every quotation mark in them is where it belongs.

    A misplaced one means that another separator is right: commas within the texts of `"a";"b, c"`.
    """
    with _long_fields():
        for strict in (True, False):
            with _lines(path, name) as lines, _readable_errors(name) if not strict else suppress(csv.Error):
                return list(islice((row for row in shape.reader(lines, strict=strict) if row), count)), strict
    raise AssertionError("the lenient reader returned nothing")


def column_names(first: list[str], name: str) -> tuple[str, ...]:
    """Return the columns that a first line names; an unnamed one gets pandas' name for it. Raises UserError."""
    twice = [column for column in first if column and first.count(column) > 1]
    if twice:
        raise UserError(f"{name}: its first line names the column '{brief(twice[0])}' twice; allowed: each once")
    if not any(column.strip() for column in first):
        raise UserError(f"{name}: its first line names no columns; allowed: a name for each")
    return tuple(column or f"Unnamed: {place}" for place, column in enumerate(first))


def _rows(path: Path, name: str, shape: Shape) -> Iterator[list[str]]:
    """Yield each row behind the header, its fields counted, without empty lines."""
    width, row, begun = len(shape.columns), 0 if shape.header else 1, 1
    with _lines(path, name) as lines, _readable_errors(name):
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
    """Return the error for a row with more or fewer fields than there are columns."""
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
    """Open a file as lines with their ends, without a byte order mark. Raises UserError for text that is not UTF-8."""
    try:
        with formats.opened(path, name) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            yield _without_nul(text, name)
    except UnicodeDecodeError as error:
        raise formats.not_text(path, name) from error


def _without_nul(lines: Iterable[str], name: str) -> Iterator[str]:
    """Yield the lines; refuse NUL, which Python's reader rejects up to 3.10 and takes for a letter since."""
    for number, line in enumerate(lines, 1):
        if "\0" in line:
            raise UserError(f"{name}: line {number} holds a NUL character; allowed: text without, saved as UTF-8")
        yield line


@contextmanager
def _readable_errors(name: str) -> Iterator[None]:
    """Report what Python's reader says of a file in one line."""
    try:
        yield
    except csv.Error as error:
        raise UserError(
            f"{name}: cannot be read as separated values: {error}; allowed: csv as RFC 4180 has it"
        ) from error


@contextmanager
def _long_fields() -> Iterator[None]:
    """Lift the limit on a field's length for a while; it is the process's own, and other readers keep theirs."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)
