"""Rows of JSON: a list, a row a line, or inside a document (SQuAD's questions within paragraphs, for instance).

Python's own json module reads them. `datasets` would read them with PyArrow, which takes a text such as 2020-01-01 for
a date, and types a column anew for every ten megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.core.text import first_line
from hf_mps.finetune.data import formats
from hf_mps.finetune.data.rows import ROWS, Tables

if TYPE_CHECKING:
    import pyarrow
    from datasets import Features

Row = dict[str, Any]
Source = Callable[[], Iterator[Row]]

# Lists and objects inside one another in a value. A conversation with tools has 6; Arrow's own walk ends at some 1,000.
DEEPEST = 32
KINDS = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
NESTED = (KINDS[list], KINDS[dict])


class NotARow(ValueError):
    """A text or value that is no row, with the reason as the rest of a sentence about it; `remedy` says what to do."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.remedy = remedy


def tables(path: Path, name: str, columns: Collection[str], field: str | None = None, *, lists: bool = False) -> Tables:
    """Yield the rows of a JSON file; of columns other than `columns` only the name is kept.

    `field` leads to the rows inside the document, through objects and lists; each row gains the plain values around it.
    One object of lists (pandas' orient="list", `Dataset.to_dict`) is columns; where a row itself holds `lists` of
    words, those are lists of lists. A column has one type in all rows; differing objects are kept as JSON. Raises
    UserError, calling the file `name`, for what is no JSON, for rows that are no objects, and for a wanted column of
    several types.
    """
    rows = _source(path, name, columns, field, lists)
    first = list(islice(rows(), ROWS))
    if not first:
        raise UserError(f"{name}: {formats.NO_ROWS}")
    # A small file is parsed once; a larger one again, rather than held in memory as Python objects.
    again = partial(iter, first) if len(first) < ROWS else rows
    features = _features(_in_parts(again()), columns, name)
    if not features:
        raise UserError(f"{name}: its rows are empty objects; allowed: objects with the columns as their keys")
    for number, some in _in_parts(again()):
        yield _table(some, number, features, columns, name)


def _in_parts(rows: Iterator[Row]) -> Iterator[tuple[int, list[Row]]]:
    """Yield ROWS rows at a time with the number of the first."""
    number = 1
    while some := list(islice(rows, ROWS)):
        yield number, some
        number += len(some)


def _source(path: Path, name: str, columns: Collection[str], field: str | None, nested: bool) -> Source:
    """Return a function that goes through a file's rows anew at each call; a single document is held in memory."""
    lines = formats.kind(path) == "jsonl"
    if lines and field is None:
        return lambda: _rows(_lines(path, name), name)
    document = list(_lines(path, name)) if lines else _document(path, name)
    if field is not None:
        found = list(_explode(document, field.split("."), {}, name, field))
        if not found:
            raise UserError(f"{name}: data.field {field} holds no rows; allowed: at least one")
        return lambda: iter(found)
    if isinstance(document, dict):
        lists = {key: value for key, value in document.items() if isinstance(value, list) and value}
        inside = [key for key, value in lists.items() if all(isinstance(row, dict) for row in value)]
        if inside and not any(key in columns for key in document):  # a file of one row may well hold a conversation
            shown = " or ".join(f"data.field={brief(key)}" for key in inside)
            raise UserError(f"{name}: is one object that holds the rows inside; next: {shown}")
        if document and all(isinstance(value, dict) and next(iter(value), None) == "0" for value in document.values()):
            problem = "is one object of columns, as pandas' to_json writes by default"
            raise UserError(f"{name}: {problem}; next: to_json(FILE, orient='records') writes rows")
        document = _turned(document, name) if _in_columns(document, nested) else [document]
    if not isinstance(document, list):
        raise UserError(f"{name}: is {KINDS.get(type(document), 'nothing')}; allowed: a list of rows, or a row a line")
    return lambda: _rows(iter(document), name)


def _in_columns(document: Row, nested: bool) -> bool:
    """Return whether an object holds columns; a list of objects may be one row's conversation."""
    inside = dict if not nested else (dict, str, int, float)
    return bool(document) and all(
        isinstance(values, list) and values and not isinstance(values[0], inside) for values in document.values()
    )


def _turned(document: Row, name: str) -> list[Row]:
    """Return the rows of an object of columns. Raises UserError for columns of different lengths."""
    lengths = {key: len(values) for key, values in document.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{brief(key)} {length}" for key, length in lengths.items())
        raise UserError(f"{name}: is one object of columns of different lengths ({told}); allowed: as many in each")
    return [dict(zip(document, values, strict=True)) for values in zip(*document.values(), strict=True)]


def _document(path: Path, name: str) -> Any:
    """Return the value of a whole file; of several values, one a line, their list."""
    with formats.opened_text(path, name, newline="") as lines:
        text = "".join(lines)
    try:
        return parse(text)
    except NotARow as error:
        cause = error.__cause__
        if isinstance(cause, json.JSONDecodeError) and cause.msg == "Extra data" and cause.lineno > 1:
            return list(_lines(path, name))  # a row in each line, by the name of plain .json
        raise UserError(f"{name}: {error}{error.remedy}") from error


def _lines(path: Path, name: str) -> Iterator[Any]:
    """Yield the value of each line that holds one."""
    # A carriage return is white space to JSON, and ends no row.
    with formats.opened_text(path, name, newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if text := line.strip():
                    yield parse(text)
            except NotARow as error:
                raise UserError(f"{name}: line {number} {error}{error.remedy}") from error


def parse(text: str) -> Any:
    """Return the value of a JSON text. Raises NotARow."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise NotARow("is no JSON: its values are nested too deep", "; next: write the values flatter") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        # A text that ends in the middle of a value may be a file that was cut off.
        ends = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        remedy = ", in the middle of a value; next: fetch the file again" if ends else "; next: correct it there"
        raise NotARow(f"is no JSON: {error.msg} ({place})", remedy) from error
    except ValueError as error:  # a number of more digits than Python converts
        raise NotARow(f"is no JSON: {first_line(error)}", "; next: correct it there") from error


def as_row(value: Any) -> Row:
    """Return the row that a value is: an object, or a bare text, a row of the column `text`. Raises NotARow."""
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise NotARow(f"is {KINDS.get(type(value), 'nothing')}; allowed: an object with the columns as its keys")
    return value


def _rows(values: Iterable[Any], name: str) -> Iterator[Row]:
    for number, value in enumerate(values, 1):
        try:
            yield as_row(value)
        except NotARow as error:
            raise UserError(f"{name}: row {number} {error}") from error


def _explode(here: Any, path: list[str], around: Row, name: str, field: str) -> Iterator[Row]:
    """Yield each object at the end of `path`, with the plain values (text, numbers) of the objects around it."""
    if isinstance(here, list):
        for item in here:
            yield from _explode(item, path, around, name, field)
    elif not isinstance(here, dict):
        raise UserError(f"{name}: data.field {field} leads to a {type(here).__name__}; allowed: lists of dicts")
    elif not path:
        yield around | here
    elif path[0] not in here:
        there = ", ".join(map(brief, here))
        raise UserError(f"{name}: data.field {field}: no '{path[0]}' among {there}{nearest(path[0], map(str, here))}")
    else:
        plain = {key: value for key, value in here.items() if not isinstance(value, (list, dict))}
        yield from _explode(here[path[0]], path[1:], around | plain, name, field)


def _features(every: Iterable[tuple[int, list[Row]]], columns: Collection[str], name: str) -> Features:
    """Return each column's type over all rows. Raises UserError where a wanted column has several."""
    import datasets
    import pyarrow

    types: dict[str, pyarrow.DataType] = {}
    mixed: set[str] = set()
    first: dict[str, tuple[str, int]] = {}
    for number, rows in every:
        for column in dict.fromkeys(key for row in rows for key in row):
            types.setdefault(column, pyarrow.null())
            if column not in columns:
                continue
            values = [row.get(column) for row in rows]
            _check_kinds(values, number, column, first, name)
            try:
                schemas = [pyarrow.schema([("value", kind)]) for kind in (types[column], pyarrow.array(values).type)]
                # permissive: whole numbers and fractions become fractions; numbers and text stay apart.
                types[column] = pyarrow.unify_schemas(schemas, promote_options="permissive").field("value").type
            except (pyarrow.ArrowException, OverflowError, ValueError) as error:
                # Objects that differ, within these rows or from those before. `datasets` 4.0 has no type for them.
                nested = first[column][0] in NESTED and hasattr(datasets, "Json")
                if not nested or any(map(_lost, values)):
                    raise _unfit(values, number, column, name, error) from error
                mixed.add(column)
    made = datasets.Features.from_arrow_schema(pyarrow.schema(list(types.items())))
    made.update({column: datasets.Json() for column in mixed})
    return made


def _check_kinds(values: list[Any], number: int, column: str, first: dict[str, tuple[str, int]], name: str) -> None:
    """Raise UserError for a value of another kind than the column's first, and for one nested too deep.

    `first` holds the kind of each column's first value and its row, and is filled here.
    """
    for row, value in enumerate(values, number):
        if value is None:
            continue
        kind = KINDS[type(value)]
        before, where = first.setdefault(column, (kind, row))
        if kind != before:
            told = f"'{brief(column)}' is {kind}, and in row {where} {before}"
            raise UserError(f"{name}: row {row}: {told}; allowed: one kind in all rows")
        if _deeper(value, DEEPEST):
            problem = f"'{brief(column)}' is nested more than {DEEPEST} deep"
            raise UserError(f"{name}: row {row}: {problem}; next: write it flatter")


def _table(rows: list[Row], number: int, features: Features, wanted: Collection[str], name: str) -> pyarrow.Table:
    import pyarrow
    from datasets.table import table_cast

    schema = features.arrow_schema
    columns = []
    for column in schema.names:
        values = [row.get(column) if column in wanted else None for row in rows]
        kind = schema.field(column).type
        if type(features[column]).__name__ == "Json":
            values = [value if value is None else json.dumps(value) for value in values]
            kind = pyarrow.string()
        try:
            columns.append(pyarrow.array(values, kind))
        except (pyarrow.ArrowException, OverflowError, ValueError) as error:
            raise _unfit(values, number, column, name, error) from error
    return table_cast(pyarrow.table(columns, names=schema.names), schema)


def _deeper(value: Any, left: int) -> bool:
    """Return whether lists and objects nest more than `left` deep in `value`."""
    if not isinstance(value, (list, dict)):
        return False
    return left == 0 or any(_deeper(one, left - 1) for one in (value.values() if isinstance(value, dict) else value))


def _lost(value: Any) -> str:
    """Return what of a value has no place in a table, and what is allowed; empty where all has."""
    if isinstance(value, (list, dict)):
        inside = [*value, *value.values()] if isinstance(value, dict) else value
        return next(filter(None, map(_lost, inside)), "")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "an integer of more than 64 bits; allowed: smaller ones, or write it as a text"
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        return "half of a surrogate pair, which is no text; allowed: Unicode text"
    return ""


def _unfit(values: list[Any], number: int, column: str, name: str, error: Exception) -> UserError:
    """Return the error for a column that no table holds, with the first value to blame where a single one is."""
    row, lost = next(((row, lost) for row, one in enumerate(values, number) if (lost := _lost(one))), (0, ""))
    if lost:
        return UserError(f"{name}: row {row}: '{brief(column)}' holds {lost}")
    return UserError(f"{name}: '{brief(column)}' cannot be kept: {first_line(error)}; allowed: one kind in all rows")
