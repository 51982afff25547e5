"""Tables: separated values (csv, tsv), a workbook's first sheet, plain lines and CoNLL, all text, and Parquet.

Python's own csv module reads separated values, every row with as many fields as the first. pandas, with which
`datasets` reads a csv, makes an index of the first fields where rows are longer than the header, and fills up shorter
rows: both lose data without a word.
"""

from __future__ import annotations

import csv
import datetime
import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from hf_mps.core import extras
from hf_mps.core.errors import UserError, brief
from hf_mps.core.text import counted, first_line
from hf_mps.finetune.data import formats
from hf_mps.finetune.data.rows import Tables, in_tables

SEPARATORS = {"csv": (",", ";", "\t", "|"), "tsv": ("\t",)}
# Where there is no header, the separator is chosen by so many rows.
LOOKED_AT = 50
# A line added behind the last: only an unclosed quotation mark swallows it.
END = "hf-mps-end-7c1d20f4"
UNCLOSED = "opens a quotation mark that is never closed"
# Rows of Parquet at a time: of images at 100 kB each 100 MB.
PARQUET_ROWS = 1000
CUT_OFF = "ends without a line break: is its last row whole?"
# CoNLL-2003's line between two documents: it has tags, and is no sentence.
DOCUMENT = "-DOCSTART-"
# CoNLL-U's ids of what is no word: several written as one (8-9), and words that are not written (8.1).
CONLLU, NO_WORD = ".conllu", re.compile(r"\d+[-.]\d+\s")

Roles = Mapping[str, str]
"""Columns by their roles."""
Lines = Callable[[], AbstractContextManager[Iterator[str]]]
"""Opens a file's lines, from the first one at each call."""


@dataclass(frozen=True)
class Shape:
    """How a file is written: its separator and `columns`, and whether a space follows each separator.

    A tab-separated file has no quoting (IANA text/tab-separated-values): GLUE's hold lone quotation marks.
    """

    separator: str
    columns: tuple[str, ...] = ()
    spaced: bool = False
    quoted: bool = True
    header: bool = True

    def reader(self, lines: Iterable[str], *, strict: bool = False) -> Any:
        """Return Python's reader of these lines; its `line_num` counts them. `strict` forbids text behind a closing
        quote.
        """
        quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if self.quoted else csv.QUOTE_NONE
        return csv.reader(lines, delimiter=self.separator, skipinitialspace=self.spaced, quoting=quoting, strict=strict)

    def misfit(self, fields: list[str]) -> str:
        """Say how many fields a row has, and how many the first; empty where they are as many."""
        if len(fields) == len(self.columns):
            return ""
        return f"has {counted(len(fields), 'field')} and {'the header' if self.header else 'row 1'} {len(self.columns)}"


def separated(path: Path, name: str, *, header: bool = True) -> Tables:
    """Yield the rows of a csv or tsv, every value as text; without a `header` the columns are called 0, 1, 2 and so on.

    Raises UserError for text that is not UTF-8, unnamed or repeated columns, a row with more or fewer fields than the
    first, and a quotation mark that is never closed.
    """

    @contextmanager
    def lines() -> Iterator[Iterator[str]]:
        def without_nul(text: Iterator[str]) -> Iterator[str]:
            # Python's reader rejects NUL up to 3.10 and takes it for a letter since.
            for number, line in enumerate(text, 1):
                if "\0" in line:
                    problem = f"line {number} holds a NUL character"
                    raise UserError(f"{name}: {problem}; allowed: text without, saved as UTF-8")
                yield line

        with formats.opened_text(path, name, newline="") as text:
            yield without_nul(text)

    with readable_errors(name):
        shape = shape_of(lines, formats.kind(path) or "csv", name, header=header)
        yield from in_tables(_rows(lines, name, shape), dict.fromkeys(shape.columns), around=long_fields)


def separated_notes(path: Path) -> tuple[str, ...]:
    """Return what a person may want to check in a readable csv or tsv: a last row that may be cut off."""
    if formats.packed(path) or not path.stat().st_size:  # gzip has a checksum: one that is cut off cannot be unpacked
        return ()
    with path.open("rb") as file:
        file.seek(-1, io.SEEK_END)
        return () if file.read(1) in b"\r\n" else (CUT_OFF,)


def shape_of(lines: Lines, kind: str, name: str, *, header: bool) -> Shape:
    """Return how a csv or tsv is written, from its first row, or from the first rows where it has no header.

    Raises UserError for a header that names no columns, or a column twice.
    """
    shapes = [Shape(separator, quoted=kind == "csv", header=header) for separator in SEPARATORS[kind]]

    def first_rows(shape: Shape) -> tuple[list[list[str]], bool]:
        """Return the first rows that are not empty, and whether every quotation mark in them is where it belongs.

        A misplaced one means that another separator is right: commas within the texts of `"a";"b, c"`.
        """
        count = 1 if header else LOOKED_AT
        with suppress(csv.Error), long_fields(), lines() as text:
            return list(islice(filter(None, shape.reader(text, strict=True)), count)), True
        with long_fields(), lines() as text:
            return list(islice(filter(None, shape.reader(text)), count)), False

    first = {shape: first_rows(shape) for shape in shapes}
    # Spreadsheets in countries that write 0,5 save csv with semicolons.
    several = [shape for shape, (rows, _) in first.items() if rows and len(rows[0]) > 1]
    alike = [shape for shape in several if len({len(row) for row in first[shape][0]}) == 1]
    clean = [shape for shape in alike if first[shape][1]]
    shape = [*clean, *alike, *several, *shapes][0]
    rows, _ = first[shape]
    spaced = bool(rows) and len(rows[0]) > 1 and all(field.startswith(" ") for row in rows for field in row[1:])
    shape = replace(shape, spaced=spaced)
    with long_fields(), lines() as text:  # once more: with `spaced` a quotation mark behind the space counts
        top: list[str] = next(filter(None, shape.reader(text)), [])
    return replace(shape, columns=_column_names(top, name) if header else tuple(map(str, range(len(top)))))


def unseparated(name: str, column: str) -> str:
    """Return what to do about a table whose whole first line is its one `column`; empty where that looks right."""
    other = next((mark for mark in (*SEPARATORS["csv"], ":", "^", "~") if mark in column), "")
    path = Path(name).expanduser()
    if not other or formats.kind(path) not in SEPARATORS:
        return ""
    if other in SEPARATORS["csv"] and formats.kind(path) == "tsv":
        new = formats.in_shell(path.with_name(path.name.replace(".tsv", ".csv")))
        return f"; '{other}' separates its columns, and in .tsv a tab does; next: mv {formats.in_shell(path)} {new}"
    way_on = f"next: tr '{other}' , < {formats.in_shell(path, unpacked=True)} > new.csv"
    return f"; if '{other}' separates its columns, write a comma instead; {way_on}"


def _column_names(first: list[str], name: str) -> tuple[str, ...]:
    """Return the columns that a first line names; an unnamed one gets pandas' name for it. Raises UserError."""
    twice = [column for column in first if column and first.count(column) > 1]
    if twice:
        raise UserError(f"{name}: its first line names the column '{brief(twice[0])}' twice; allowed: each once")
    if not any(column.strip() for column in first):
        raise UserError(f"{name}: its first line names no columns; allowed: a name for each")
    return tuple(column or f"Unnamed: {place}" for place, column in enumerate(first))


def rows(lines: Iterable[str], shape: Shape) -> Iterator[tuple[int, list[str], str]]:
    """Yield of each row that is not empty, the header among them, the number of its first line, its fields, and what is
    wrong with it as the rest of a sentence, empty where nothing is.
    """
    reader, begun = shape.reader(chain(lines, [END])), 1
    for fields in reader:
        if fields == [END]:
            return
        if fields and (len(shape.columns) == 1 or len(fields) > 1 or fields[0].strip()):
            yield begun, fields, UNCLOSED if fields[-1].endswith(END) else shape.misfit(fields)
        begun = reader.line_num + 1


def _rows(lines: Lines, name: str, shape: Shape) -> Iterator[list[str]]:
    """Yield the fields of each row behind the header. Raises UserError for a row that does not fit it."""
    with lines() as text:
        for row, (begun, fields, wrong) in enumerate(rows(text, shape), 0 if shape.header else 1):
            if wrong == UNCLOSED:
                place = f"row {row}" if row else "the first line"
                raise UserError(f"{name}: a quotation mark that opens in {place} is never closed; next: close it")
            if wrong:
                with lines() as again:
                    last = next(islice(again, begun - 1, None), "")
                    whole = last.endswith(("\n", "\r")) or next(again, None) is not None
                if len(fields) < len(shape.columns) and not whole:
                    problem = f"the file ends in the middle of row {row}, which {wrong}; next: fetch it again"
                    raise UserError(f"{name}: {problem}")
                allowed = "as many in each, a text with a separator inside in quotation marks"
                raise UserError(f"{name}: row {row} (line {begun}) {wrong}; allowed: {allowed}")
            if row:
                yield fields


@contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Report in one line what Python's reader says of a file."""
    try:
        yield
    except csv.Error as error:
        raise UserError(f"{name}: cannot be read as separated values: {error}; allowed: csv as in RFC 4180") from error


@contextmanager
def long_fields() -> Iterator[None]:
    """Lift the limit on a field's length for a while. The limit is the process's; other readers keep theirs."""
    before = csv.field_size_limit(2**31 - 1)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def sheet(path: Path, name: str, *, header: bool = True) -> Tables:
    """Yield the rows of a workbook's first sheet (.xlsx) as a person reads them: text, without empty rows.

    A whole number has no decimals, a date is in ISO 8601, a boolean is TRUE or FALSE, and a formula counts as its last
    stored value. Raises UserError for a file that is no workbook, a formula that was never calculated, a cell with an
    error (#N/A), and where openpyxl is not installed.
    """
    with ExitStack() as stack:
        # Opened twice: with its values, and with its formulas.
        values, formulas = (stack.enter_context(_book(path, name, values=one)).worksheets[0] for one in (True, False))
        for opened in (values, formulas):
            opened.reset_dimensions()  # some programs write A1 for the size, and openpyxl would read no more than that
        rows = _cells(values, formulas, name)
        first = next(rows, None)
        if first is None:
            raise UserError(f"{name}: the first sheet holds no rows; allowed: at least one")
        top = _trimmed(first[1])
        columns = _column_names(top, name) if header else tuple(map(str, range(len(top))))
        yield from in_tables(_body(rows if header else chain([first], rows), columns, name), dict.fromkeys(columns))


def sheet_notes(path: Path, name: str) -> tuple[str, ...]:
    """Name the sheet that was read, where there are more."""
    with _book(path, name, values=True) as book:
        names = book.sheetnames
    return (f"sheet '{names[0]}', the first of {len(names)}",) if len(names) > 1 else ()


def _body(rows: Iterator[tuple[int, list[str]]], columns: tuple[str, ...], name: str) -> Iterator[list[str]]:
    for number, fields in rows:
        if any(fields[len(columns) :]):
            told = f"row {number} of the sheet has {len(_trimmed(fields))} values and the header {len(columns)}"
            raise UserError(f"{name}: {told}; allowed: a value only below a name")
        yield [*fields, *[""] * len(columns)][: len(columns)]


def _trimmed(fields: list[str]) -> list[str]:
    """Return the fields without the empty ones at the end."""
    return fields[: max((at for at, field in enumerate(fields, 1) if field), default=0)]


def _cells(values: Any, formulas: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not empty, with its number in the sheet."""
    from openpyxl.utils import get_column_letter

    for number, (row, formula_row) in enumerate(zip(values.iter_rows(), formulas.iter_rows(), strict=True), 1):
        pairs = enumerate(zip(row, formula_row, strict=True), 1)
        fields = [_text(*pair, f"{name}: cell {get_column_letter(at)}{number}") for at, pair in pairs]
        if any(fields):
            yield number, fields


def _text(cell: Any, formula_cell: Any, place: str) -> str:
    """Return what a cell shows; `formula_cell` is the same cell with its formula."""
    value = cell.value
    if value is None and formula_cell.data_type == "f":
        raise UserError(f"{place} holds a formula without a value; next: open and save it in a spreadsheet program")
    if cell.data_type == "e":
        raise UserError(f"{place} holds the error {value}; allowed: values")
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    if isinstance(value, (datetime.date, datetime.time)):
        return value.isoformat()
    return "" if value is None else str(value)


@contextmanager
def _book(path: Path, name: str, *, values: bool) -> Iterator[Any]:
    try:
        import openpyxl
    except ImportError as error:
        raise UserError(f"{name}: reading .xlsx needs openpyxl; next: {extras.install('excel')}") from error
    from openpyxl.utils.exceptions import InvalidFileException

    try:
        book = openpyxl.load_workbook(path, read_only=True, data_only=values)
    except (InvalidFileException, zipfile.BadZipFile, KeyError, ValueError, SyntaxError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(f"{name}: is no workbook that can be read: {first_line(error)}") from error
    if not book.worksheets:
        raise UserError(f"{name}: the workbook holds no sheet; allowed: rows in its first sheet")
    try:
        yield book
    finally:
        book.close()


def parquet(path: Path, name: str) -> Tables:
    """Yield the rows of a Parquet file, a few at a time: an image may be in each. Raises UserError for a broken one."""
    import pyarrow

    with formats.opened_parquet(path, name) as file:
        schema = file.schema_arrow
        yield schema.empty_table()
        for batch in file.iter_batches(PARQUET_ROWS):
            yield pyarrow.Table.from_batches([batch], schema)


def texts(path: Path, name: str) -> Tables:
    """Yield a file's lines without their ends, in the column `text`. Raises UserError for text that is not UTF-8."""
    with formats.opened_text(path, name) as lines:
        yield from in_tables(((line.rstrip("\n"),) for line in lines), {"text": None})


@dataclass(frozen=True)
class _Columns:
    """The separator of the columns (None: spaces), their number, and which of them hold words and tags."""

    separator: str | None
    width: int
    words: int
    tags: int


def sentences(path: Path, name: str, roles: Roles, defaults: Roles) -> Tables:
    """Yield the sentences of a CoNLL file (a word and its tags a line, a blank line between sentences): lists of words
    and of tags, under the columns that `roles` names.

    Columns are numbered from 0, or backwards from -1, and are separated by tabs or spaces. Where `roles` has
    `defaults`' own name, words are the first column and tags the last. Raises UserError for a line with more or fewer
    columns than the first, and for a name or number that is no column.
    """
    import pyarrow

    strings = pyarrow.list_(pyarrow.string())
    yield from in_tables(_sentences(path, name, roles, defaults), {roles["words"]: strings, roles["tags"]: strings})


def sentence_notes(path: Path, name: str, roles: Roles, defaults: Roles) -> tuple[str, ...]:
    """Say which columns were taken for words and tags. Raises UserError as `sentences`."""
    with formats.opened_text(path, name) as lines:
        found = next((columns for line in lines if (columns := _columns(line, name, roles, defaults))), None)
    return (f"words in column {found.words}, tags in column {found.tags} of {found.width}",) if found else ()


def _columns(line: str, name: str, roles: Roles, defaults: Roles) -> _Columns | None:
    """Return the columns as the first line with any has them; None for an empty line and a comment before it.

    Raises UserError where a column is missing, or words and tags are one.
    """
    separator = "\t" if "\t" in line else None
    if not line.strip() or line.split()[0] == DOCUMENT or (line.startswith("# ") and "=" in line):  # "# id = 1"
        return None
    width = len(line.rstrip("\n").split(separator))
    places = {"words": 0, "tags": width - 1}
    for role in places:
        asked = roles[role]
        if asked == defaults[role]:
            continue
        number = int(asked) if asked.removeprefix("-").isdecimal() else None
        if number is None or not -width <= number < width:
            shown = f"0 to {width - 1}, or -1 for the last" if width > 1 else "0"
            told = f"there is no column '{asked}' for data.columns.{role}; a CoNLL file's columns have numbers: {shown}"
            raise UserError(f"{name}: {told}")
        places[role] = number % width
    if places["words"] == places["tags"]:
        told = f"column {places['words']} of {width} would be both words and tags"
        raise UserError(f"{name}: {told}; next: data.words=NUMBER data.tags=NUMBER, or a line for each word")
    return _Columns(separator, width, **places)


def _sentences(path: Path, name: str, roles: Roles, defaults: Roles) -> Iterator[tuple[list[str], list[str]]]:
    words: list[str] = []
    tags: list[str] = []
    columns: _Columns | None = None
    numbered = formats.ending(path) == CONLLU
    with formats.opened_text(path, name) as lines:
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
