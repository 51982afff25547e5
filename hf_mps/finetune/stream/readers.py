"""The rows of one piece of a file, from any place in it, each with the place behind it; broken ones are told apart."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import IO, Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune.data.csv import SEPARATORS, Shape, column_names
from hf_mps.finetune.stream.files import File
from hf_mps.finetune.stream.slices import WHOLE, FileSlice

BLOCK = 2**20
# Rows of Parquet that are Python objects at a time.
AT_ONCE = 256
LINE_END, MARK = b"\n", b"\xef\xbb\xbf"


class Row(dict[str, Any]):
    """The values of a row by their roles, and where it lies: source, unit, the place behind it."""

    place: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Broken:
    """A row that cannot be used, with the reason as the rest of a sentence about it: "is no JSON"."""

    why: str


Raw = Mapping[str, Any]
"""A row under the names of its columns."""
Rows = Iterator[tuple[int, Raw | Broken]]


def read(file: File, unit: FileSlice, position: int | None, columns: Sequence[str]) -> Rows:
    """Yield (the place behind it, row) of each row of a unit from `position` on, None for its beginning.

    A place is a number of bytes in a file of lines, a number of rows in Parquet. Of Parquet only `columns` are read.
    Raises UserError for a file that cannot be read at all.
    """
    readers: dict[str, Callable[..., Rows]] = {"parquet": _parquet, "jsonl": _json, "text": _text}
    reader = readers.get(file.kind, _table)
    try:
        with file.opened() as opened:
            yield from reader(opened, file, unit, position, columns)
    except (OSError, EOFError) as error:
        raise UserError(f"{file.url}: cannot be read: {error}") from error
    except Exception as error:
        if file.local or not _of_a_client(error):
            raise
        raise UserError(f"{file.url}: cannot be read: {first_line(error)}; next: the same command") from error


def _of_a_client(error: Exception) -> bool:
    """Whether an error is one that a file system's client has for itself: httpx's, aiohttp's, botocore's."""
    return type(error).__module__.partition(".")[0] not in ("builtins", "hf_mps")


def _json(opened: IO[bytes], file: File, unit: FileSlice, position: int | None, columns: Sequence[str]) -> Rows:
    for place, line in _lines(opened, unit, position):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            yield place, Broken("is not UTF-8")
            continue
        except ValueError as error:
            yield place, Broken(f"is no JSON ({getattr(error, 'msg', error)})")
            continue
        yield place, row if isinstance(row, dict) else Broken(f"is a JSON {type(row).__name__} and no object")


def _text(opened: IO[bytes], file: File, unit: FileSlice, position: int | None, columns: Sequence[str]) -> Rows:
    for place, line in _lines(opened, unit, position):
        try:
            yield place, {"text": line.decode().rstrip("\r\n")}
        except UnicodeDecodeError:
            yield place, Broken("is not UTF-8")


def _table(opened: IO[bytes], file: File, unit: FileSlice, position: int | None, columns: Sequence[str]) -> Rows:
    """Read separated values; the header is read anew wherever the rows begin."""
    shape, begin = _shape(opened, file)
    opened.seek(begin if position is None else position)
    place = opened.tell()

    def lines() -> Iterator[str]:
        nonlocal place
        for line in opened:
            line = line.removeprefix(MARK) if place == 0 else line
            place = opened.tell()
            # A letter that is no UTF-8 ends up as U+FFFD, and its row is broken.
            yield line.decode(errors="replace")

    limit = csv.field_size_limit(2**31 - 1)
    try:
        rows = shape.reader(lines())
        while True:
            try:
                fields = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield place, Broken(f"is no row of separated values ({error})")
                continue
            if not fields:
                continue
            yield place, _row(fields, shape)
    finally:
        csv.field_size_limit(limit)


def _row(fields: Sequence[str], shape: Shape) -> Raw | Broken:
    if len(fields) != len(shape.columns):
        return Broken(f"has {len(fields)} fields where there are {len(shape.columns)} columns")
    if any("\ufffd" in field for field in fields):
        return Broken("is not UTF-8")
    return dict(zip(shape.columns, fields, strict=True))


def _shape(opened: IO[bytes], file: File) -> tuple[Shape, int]:
    """Return how a table is written, by its first line: the separator with which it has most fields; and where the
    first row begins.
    """
    line = opened.readline()
    text = line.decode("utf-8-sig", errors="replace")
    quoted = file.kind == "csv"
    shapes = [Shape(separator, (), quoted=quoted, header=file.header) for separator in SEPARATORS[file.kind]]
    fields, shape = max(((next(shape.reader([text]), []), shape) for shape in shapes), key=lambda pair: len(pair[0]))
    columns = column_names(fields, file.url) if file.header else tuple(map(str, range(len(fields))))
    return Shape(shape.separator, columns, quoted=quoted, header=file.header), len(line) if file.header else 0


def _parquet(opened: IO[bytes], file: File, unit: FileSlice, position: int | None, columns: Sequence[str]) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(opened)
        named = table.schema_arrow.names
        outer = dict.fromkeys(name if name in named else name.partition(".")[0] for name in columns)
        wanted = [column for column in outer if column in named]
        groups = range(table.num_row_groups) if unit.end == WHOLE else range(unit.start, unit.end)
        place = 0
        for group in groups:
            size = table.metadata.row_group(group).num_rows if table.num_row_groups else 0
            if place + size <= (position or 0):
                place += size
                continue
            for batch in table.iter_batches(AT_ONCE, row_groups=[group], columns=wanted):
                skipped = min(max(0, (position or 0) - place), len(batch))
                place += skipped
                for row in batch.slice(skipped).to_pylist():
                    place += 1
                    yield place, row
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{file.url}: cannot be read as parquet: {error}") from error


def _lines(opened: IO[bytes], unit: FileSlice, position: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield (the byte behind it, line) of the lines that begin within the unit, from byte `position` on."""
    at = unit.start if position is None else position
    if position is None and at > 0:
        opened.seek(at - 1)
        at += len(opened.readline()) - 1  # the rest of a line that begins before
    else:
        opened.seek(at)
    if unit.end != WHOLE and at >= unit.end:
        return
    for line in opened:
        begun = at
        at += len(line)
        yield at, line.removeprefix(MARK) if begun == 0 else line
        if unit.end != WHOLE and at >= unit.end:
            return


def pick(row: Raw, columns: Mapping[str, str]) -> Row | Broken:
    """Return a row's values by their roles; `translation.en` is a key of the dict in a column `translation`."""
    picked = Row()
    for role, column in columns.items():
        value: Any = row
        for part in [column] if column in row else column.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return Broken(f"has no {column}")
            value = value[part]
        picked[role] = value
    return picked


def place_of(file: File, unit: FileSlice, behind: int) -> str:
    """Return where a row is, for a person: the line of a local file whose place behind it is `behind`, else a number.

    Counts the lines before it, about a second for each gigabyte: for the few rows that are shown.
    """
    if file.kind == "parquet":
        group = f" of row group {unit.start + 1}" if unit.end != WHOLE else ""
        return f"{file.url}: row {behind}{group}"
    if not file.local:
        return f"{file.url}: the line that ends at byte {behind:,}"
    with file.opened() as opened:
        blocks = [BLOCK] * (behind // BLOCK) + [behind % BLOCK]
        breaks, last = 0, LINE_END
        for size in blocks:
            block = opened.read(size)
            breaks += block.count(LINE_END)
            last = block[-1:] or last
    return f"{file.url}: line {breaks + int(last != LINE_END)}"


def first_rows(file: File, unit: FileSlice, columns: Sequence[str], count: int) -> list[Raw]:
    """Return the first rows of a unit that are not broken."""
    rows = (row for _, row in read(file, unit, None, columns) if not isinstance(row, Broken))
    return list(islice(rows, count))
