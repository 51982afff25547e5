"""The rows of one slice of a file, from any place in it, each with the place behind it; broken ones are told apart."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import IO, Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune.data import formats, json_rows, tables
from hf_mps.finetune.stream.files import WHOLE, File, FileSlice

# Rows of Parquet that are Python objects at a time.
AT_ONCE = 256
# Bytes at a file's beginning that tell how a table is written.
HEAD = 2**20
MARK = b"\xef\xbb\xbf"


class Row(dict[str, Any]):
    """The values of a row by their roles, and where it is: source, slice, the place behind it."""

    place: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Broken:
    """A row that cannot be used, with the reason as the rest of a sentence about it: "is no JSON"."""

    why: str


Raw = Mapping[str, Any]
"""A row under the names of its columns."""
Rows = Iterator[tuple[int, Raw | Broken]]


def read(file: File, piece: FileSlice, position: int | None, columns: Sequence[str]) -> Rows:
    """Yield (the place behind it, row) of each row of a slice from `position` on, None for its beginning.

    A place is a number of bytes in a file of lines, a number of rows in Parquet. Of Parquet only `columns` are read.
    Raises UserError for a file that cannot be read at all.
    """
    try:
        with file.opened() as opened:
            if file.kind == "parquet":
                yield from _parquet(opened, file, piece, position, columns)
            elif file.kind in ("jsonl", "text"):
                made = _json if file.kind == "jsonl" else _text
                for place, line in _lines(opened, piece, position):
                    if file.kind == "text" or line.strip():
                        yield place, made(line)
            else:
                yield from _table(opened, file, position)
    except (OSError, EOFError) as error:
        raise UserError(f"{file.url}: cannot be read: {error}") from error
    except Exception as error:
        # A file system's client raises errors of its own: httpx's, aiohttp's, botocore's.
        if file.local or type(error).__module__.partition(".")[0] in ("builtins", "hf_mps"):
            raise
        raise UserError(f"{file.url}: cannot be read: {first_line(error)}; next: the same command") from error


def _json(line: bytes) -> Raw | Broken:
    try:
        return json_rows.as_row(json_rows.parse(line.strip()))
    except json_rows.NotARow as error:
        return Broken(str(error))


def _text(line: bytes) -> Raw | Broken:
    try:
        return {"text": line.decode().rstrip("\r\n")}
    except UnicodeDecodeError:
        return Broken("is not UTF-8")


def _table(opened: IO[bytes], file: File, position: int | None) -> Rows:
    """Read separated values; the header is read anew wherever the rows begin."""
    head = opened.readlines(HEAD)[: tables.LOOKED_AT]
    beginning = [line.removeprefix(MARK).decode(errors="replace") for line in head]
    with tables.readable_errors(file.url):
        shape = tables.shape_of(lambda: nullcontext(iter(beginning)), file.kind, file.url, header=file.header)
    if position is None:
        header = shape.reader(iter(beginning))
        next(filter(None, header if file.header else ()), None)
        position = sum(map(len, head[: header.line_num]))
    opened.seek(position)
    place = position

    def lines() -> Iterator[str]:
        nonlocal place
        for line in opened:
            line = line.removeprefix(MARK) if place == 0 else line
            place = opened.tell()
            # A letter that is no UTF-8 ends up as U+FFFD, and its row is broken.
            yield line.decode(errors="replace")

    with tables.long_fields():
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
            if misfit := shape.misfit(fields):
                yield place, Broken(misfit)
            elif any("\ufffd" in field for field in fields):
                yield place, Broken("is not UTF-8")
            else:
                yield place, dict(zip(shape.columns, fields, strict=True))


def _parquet(opened: IO[bytes], file: File, piece: FileSlice, position: int | None, columns: Sequence[str]) -> Rows:
    with formats.opened_parquet(opened, file.url) as table:
        named = table.schema_arrow.names
        outer = dict.fromkeys(name if name in named else name.partition(".")[0] for name in columns)
        wanted = [column for column in outer if column in named]
        groups = range(table.num_row_groups) if piece.end == WHOLE else range(piece.start, piece.end)
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


def _lines(opened: IO[bytes], piece: FileSlice, position: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield (the byte behind it, line) of the lines that begin within the slice, from byte `position` on."""
    # A line belongs to the slice in which it begins: the reader of that slice reads on to the line's end.
    at = piece.start if position is None else position
    if position is None and at > 0:
        opened.seek(at - 1)
        at += len(opened.readline()) - 1  # the rest of a line that begins before
    else:
        opened.seek(at)
    if piece.end != WHOLE and at >= piece.end:
        return
    for line in opened:
        begun = at
        at += len(line)
        yield at, line.removeprefix(MARK) if begun == 0 else line
        if piece.end != WHOLE and at >= piece.end:
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


def place_of(file: File, piece: FileSlice, behind: int) -> str:
    """Return where a row is, for a person: the line of a local file whose place behind it is `behind`, else a number.

    Counts the lines before it, about a second for each gigabyte: for the few rows that are shown.
    """
    if file.kind == "parquet":
        group = f" of row group {piece.start + 1}" if piece.end != WHOLE else ""
        return f"{file.url}: row {behind}{group}"
    if not file.local:
        return f"{file.url}: the line that ends at byte {behind:,}"
    number = 0
    with file.opened() as opened:
        while behind > 0 and (line := opened.readline()):
            behind, number = behind - len(line), number + 1
    return f"{file.url}: line {number}"
