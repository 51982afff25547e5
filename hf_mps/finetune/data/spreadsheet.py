"""The first sheet of an Excel workbook (.xlsx) as rows of text, as a person reads them."""

from __future__ import annotations

import datetime
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune.data.cache import ROWS, Tables
from hf_mps.finetune.data.csv import column_names


def tables(path: Path, name: str, *, header: bool = True) -> Tables:
    """Yield the rows of the first sheet, every value as text, without empty rows.

    A whole number has no decimals, a date is in ISO 8601, a boolean is TRUE or FALSE, and a formula counts as its last
    stored value. Raises UserError for a file that is no workbook, a formula that was never calculated, a cell with an
    error (#N/A), and where openpyxl is not installed.
    """
    import pyarrow

    with _sheets(path, name) as (values, formulas):
        rows = _rows(values, formulas, name)
        first = next(rows, None)
        if first is None:
            raise UserError(f"{name}: the first sheet holds no rows; allowed: at least one")
        columns = column_names(_trimmed(first[1]), name) if header else tuple(map(str, range(len(_trimmed(first[1])))))
        body = _body(rows if header else chain([first], rows), columns, name)
        schema = pyarrow.schema([(column, pyarrow.string()) for column in columns])
        while True:
            some = list(islice(body, ROWS))
            arrays = [pyarrow.array(column, pyarrow.string()) for column in zip(*some, strict=True)]
            yield pyarrow.Table.from_arrays(arrays or [[] for _ in schema], schema=schema)
            if len(some) < ROWS:
                return


def notes(path: Path, name: str) -> tuple[str, ...]:
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


def _rows(values: Any, formulas: Any, name: str) -> Iterator[tuple[int, list[str]]]:
    """Yield each row that is not empty, with its number in the sheet."""
    for number, (row, said) in enumerate(zip(values.iter_rows(), formulas.iter_rows(), strict=True), 1):
        fields = [
            _text(cell, other, f"{name}: cell {_name(at, number)}")
            for at, (cell, other) in enumerate(zip(row, said, strict=True))
        ]
        if any(fields):
            yield number, fields


def _name(column: int, row: int) -> str:
    """Return a cell's name as in Excel: B3."""
    from openpyxl.utils import get_column_letter

    return f"{get_column_letter(column + 1)}{row}"


def _text(cell: Any, formula_cell: Any, place: str) -> str:
    """Return what a cell shows; `formula_cell` is the same cell with its formula."""
    value = cell.value
    if value is None:
        if formula_cell.data_type == "f":
            raise UserError(f"{place} holds a formula without a value; next: open and save it in a spreadsheet program")
        return ""
    if cell.data_type == "e":
        raise UserError(f"{place} holds the error {value}; allowed: values")
    if isinstance(value, bool):
        return str(value).upper()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, datetime.datetime) and value.time() == datetime.time():
        return value.date().isoformat()
    return value.isoformat() if isinstance(value, (datetime.date, datetime.time)) else str(value)


@contextmanager
def _sheets(path: Path, name: str) -> Iterator[tuple[Any, Any]]:
    """Open the first sheet twice: with its values, and with its formulas."""
    with _book(path, name, values=True) as values, _book(path, name, values=False) as formulas:
        sheets = values.worksheets[0], formulas.worksheets[0]
        for sheet in sheets:
            sheet.reset_dimensions()  # some programs write A1 for the size, and openpyxl would read no more than that
        yield sheets


@contextmanager
def _book(path: Path, name: str, *, values: bool) -> Iterator[Any]:
    try:
        import openpyxl
    except ImportError as error:
        raise UserError(f"{name}: reading .xlsx needs openpyxl; next: pip install openpyxl") from error
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
