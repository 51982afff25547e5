"""Rows of JSON: a list, a row a line, or inside a document (SQuAD's questions within paragraphs, for instance).

Python's own json module reads them. `datasets` would read them with PyArrow, which takes a text such as 2020-01-01 for
a date, and types a column anew for every ten megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, brief, nearest
from hf_mps.core.text import first_line
from hf_mps.finetune.data import formats
from hf_mps.finetune.data.cache import ROWS, Tables

if TYPE_CHECKING:
    import pyarrow
    from datasets import Features

Row = dict[str, Any]
Source = Callable[[], Iterator[Row]]
# Lists and objects inside one another in a value. A conversation with tools has 6; Arrow's own walk ends at some 1,000.
DEEPEST = 32
KINDLESS = "nothing"
KINDS = {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object"}
NESTED = (KINDS[list], KINDS[dict])


def tables(path: Path, name: str, columns: Collection[str], field: str | None = None) -> Tables:
    """Yield the rows of a JSON file; of columns other than `columns` only the name is kept.

    `field` leads to the rows inside the document, through objects and lists; each row gains the plain values around it.
    A column has one type in all rows; differing objects are kept as JSON. Raises UserError, calling the file `name`,
    for what is no JSON, for rows that are no objects, and for a wanted column of several types.
    """
    rows = _source(path, name, columns, field)
    first = list(islice(rows(), ROWS))
    some = first if len(first) < ROWS else None
    features = _features(_tables_of(some, rows), columns, name)
    if first and not features:
        raise UserError(f"{name}: its rows are empty objects; allowed: objects with the columns as their keys")
    for number, table in _tables_of(some, rows):
        yield _table(table, number, features, columns, name)


def _tables_of(first: list[Row] | None, rows: Source) -> Iterator[tuple[int, list[Row]]]:
    """Yield ROWS rows at a time with the number of the first; `first` holds all of them where they are so few."""
    if first is not None:
        yield 1, first
        return
    every, number = rows(), 1
    while some := list(islice(every, ROWS)):
        yield number, some
        number += len(some)


def _source(path: Path, name: str, columns: Collection[str], field: str | None) -> Source:
    """Return a function that goes through a file's rows anew at each call; a single document is held in memory."""
    if formats.kind(path) == "jsonl" and field is None:
        return lambda: _objects(_lines(path, name), name)
    document = list(_lines(path, name)) if formats.kind(path) == "jsonl" else _document(path, name)
    if field is not None:
        found = list(_explode(document, field.split("."), {}, name, field))
        if not found:
            raise UserError(f"{name}: data.field {field} holds no rows; allowed: at least one")
        return lambda: iter(found)
    if isinstance(document, dict):
        inside = [key for key, value in document.items() if _are_rows(value)]
        if inside and not any(key in columns for key in document):  # a file of one row may well hold a conversation
            shown = " or ".join(f"data.field={brief(key)}" for key in inside)
            raise UserError(f"{name}: is one object that holds the rows inside; next: {shown}")
        document = [document]
    if not isinstance(document, list):
        raise UserError(f"{name}: is {_kind(document)}; allowed: a list of rows, or a row in each line")
    return lambda: _objects(iter(document), name)


def _are_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _document(path: Path, name: str) -> Any:
    """Return the value of a whole file; of several values, one a line, their list."""
    try:
        with formats.opened(path, name) as file:
            text = file.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise formats.not_text(path, name) from error
    try:
        return _value(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and error.lineno > 1:  # a row in each line, by the name of plain .json
            return list(_lines(path, name))
        raise UserError(f"{name}: cannot be read as json: {error}{_where_it_ends(error)}") from error
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _where_it_ends(error: json.JSONDecodeError) -> str:
    """Say what to do about text that is no JSON; one that ends in the middle of a value may be cut off."""
    ended = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    return ", in the middle of a value; next: fetch the file again" if ended else "; next: correct it there"


def _lines(path: Path, name: str) -> Iterator[Any]:
    """Yield the value of each line that holds one."""
    number = 0
    try:
        with formats.opened(path, name) as file:
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield _value(text)
    except UnicodeDecodeError as error:
        raise formats.not_text(path, name) from error
    except json.JSONDecodeError as error:
        told = f"line {number}: {error.msg} (column {error.colno}){_where_it_ends(error)}"
        raise UserError(f"{name}: cannot be read as {formats.ending(path)[1:]}: {told}") from error
    except ValueError as error:
        raise UserError(f"{name}: line {number}: {error}") from error


def _value(text: str) -> Any:
    """Return a JSON value. Raises ValueError, in plain words, for numbers of thousands of digits and for endless
    nesting.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(
            f"values stand more than {DEEPEST} deep inside one another; next: write them flatter"
        ) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python's limit on the digits of an integer
        raise ValueError("holds an integer of thousands of digits; next: write it as a text") from error


def _objects(values: Iterable[Any], name: str) -> Iterator[Row]:
    """Yield the rows, each an object; a bare text is a row of the column `text`."""
    for number, value in enumerate(values, 1):
        if isinstance(value, str):
            yield {"text": value}
        elif isinstance(value, dict):
            yield value
        else:
            raise UserError(f"{name}: row {number} is {_kind(value)}; allowed: an object with the columns as its keys")


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
        raise UserError(
            f"{name}: data.field {field}: there is no '{path[0]}'; there are {there}{nearest(path[0], map(str, here))}"
        )
    else:
        plain = {key: value for key, value in here.items() if not isinstance(value, (list, dict))}
        yield from _explode(here[path[0]], path[1:], around | plain, name, field)


def _features(every: Iterable[tuple[int, list[Row]]], columns: Collection[str], name: str) -> Features:
    """Return each column's type over all rows. Raises UserError where a wanted column has several."""
    import pyarrow
    from datasets import Features

    types: dict[str, pyarrow.DataType] = {}
    mixed: set[str] = set()
    first: dict[str, tuple[str, int]] = {}
    for number, rows in every:
        for column in dict.fromkeys(key for row in rows for key in row):
            types.setdefault(column, pyarrow.null())
            if column not in columns or column in mixed:
                continue
            values = [row.get(column) for row in rows]
            if first.get(column, (KINDLESS, 0))[0] == KINDLESS:
                first[column] = _first(values, number)
            kind = _typed(values, number, column, first[column], name)
            if kind is not None and _kind_of(kind) not in (first[column][0], KINDLESS):
                raise _of_another_kind(values, number, column, first[column], name)
            try:
                types[column] = _unified([types[column], kind or pyarrow.null()])
            except pyarrow.ArrowException as error:  # objects that differ from one table to the next
                if not _json_kept(values):
                    raise _unfit(values, number, column, name, error) from error
                kind = None
            if kind is None:
                mixed.add(column)
    made = Features.from_arrow_schema(pyarrow.schema(list(types.items())))
    for column in mixed:
        made[column] = _json()
    return made


def _typed(values: list[Any], number: int, column: str, first: tuple[str, int], name: str) -> pyarrow.DataType | None:
    """Return Arrow's type of these values; None for differing lists and objects that can be kept as JSON.

    `first` is the kind of the column's first value and its row. Raises UserError for values of several kinds, too deep
    nesting, or values that no table holds.
    """
    import pyarrow

    problem = f"'{brief(column)}' is nested more than {DEEPEST} deep"
    try:
        kind = pyarrow.array(values).type
    except (pyarrow.ArrowException, OverflowError, ValueError) as error:
        if any(value is not None and _kind(value) != first[0] for value in values):
            raise _of_another_kind(values, number, column, first, name) from error
        deep = next((row for row, value in enumerate(values, number) if _deeper(value, DEEPEST)), None)
        if deep is not None:
            raise UserError(f"{name}: row {deep}: {problem}; next: write it flatter") from error
        if first[0] not in NESTED or not _json_kept(values):
            raise _unfit(values, number, column, name, error) from error
        return None
    if _depth(kind) > DEEPEST:
        deep = next(row for row, value in enumerate(values, number) if _deeper(value, DEEPEST))
        raise UserError(f"{name}: row {deep}: {problem}; next: write it flatter")
    return kind


def _first(values: list[Any], number: int) -> tuple[str, int]:
    """Return the kind of the first value that is not missing, and its row."""
    return next(((_kind(one), row) for row, one in enumerate(values, number) if one is not None), (KINDLESS, number))


def _of_another_kind(values: list[Any], number: int, column: str, first: tuple[str, int], name: str) -> UserError:
    """Return the error for the first value of another kind than the column's first."""
    before, where = first
    row, kind = next(
        (row, _kind(one)) for row, one in enumerate(values, number) if one is not None and _kind(one) != before
    )
    told = f"'{brief(column)}' is {kind}, and in row {where} {before}"
    return UserError(f"{name}: row {row}: {told}; allowed: one kind in all rows")


def _kind_of(kind: pyarrow.DataType) -> str:
    """Return the kind of values that have this Arrow type."""
    import pyarrow.types as types

    if types.is_null(kind):
        return KINDLESS
    if types.is_boolean(kind):
        return KINDS[bool]
    if types.is_integer(kind) or types.is_floating(kind):
        return KINDS[int]
    return KINDS[dict if types.is_struct(kind) else list if types.is_list(kind) else str]


def _depth(kind: pyarrow.DataType) -> int:
    """Return how deep lists and objects nest in a type."""
    import pyarrow.types as types

    if types.is_list(kind):
        return 1 + _depth(kind.value_type)
    return 1 + max((_depth(field.type) for field in kind), default=0) if types.is_struct(kind) else 0


def _unified(types: list[pyarrow.DataType]) -> pyarrow.DataType:
    """Return the one type that holds all of these; the type of no values holds nothing."""
    import pyarrow

    schemas = [pyarrow.schema([("value", kind)]) for kind in (pyarrow.null(), *types)]
    return pyarrow.unify_schemas(schemas, promote_options="permissive").field("value").type


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
    """Whether lists and objects nest more than `left` deep in `value`."""
    if not isinstance(value, (list, dict)):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return left == 0 or any(_deeper(one, left - 1) for one in inside)


def _kind(value: Any) -> str:
    return KINDS.get(type(value), KINDLESS)


def _json() -> Any:
    import datasets

    return datasets.Json()  # `_json_kept` asked whether this release has it


def _json_kept(values: list[Any]) -> bool:
    """Whether `datasets` has a type for differing objects, and these hold no number or letter that it would lose."""
    import datasets

    return hasattr(datasets, "Json") and not any(map(_lost, values))


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
    return UserError(
        f"{name}: column '{brief(column)}' cannot be kept: {first_line(error)}; allowed: one kind in all rows"
    )
