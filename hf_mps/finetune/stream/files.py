"""The files behind streamed rows, the slices that readers share, and the rows of a slice from any place in it.

`datasets` resolves patterns, URLs and hub data sets. Each row comes with the place behind it; broken ones are told
apart.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune.data import formats, json_rows, tables
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.run.logging import datasets_silent

KINDS = ("parquet", "json", "jsonl", "csv", "tsv", "text")
SPAN = 64 * 2**20
"""Bytes of a slice of a file of lines."""
MANY = 64
"""With so many files each is one slice: the footers of Parquet need not be read before the run begins."""
WHOLE = -1
# The builders of `datasets` that read such files, and their formats. A hub data set has a
# subclass with another name (datasets' builder.py, `configure_builder_class`).
BUILDERS = {"Parquet": "parquet", "Json": "jsonl", "Csv": "csv", "Text": "text"}


@dataclass(frozen=True)
class File:
    """A file of rows: where it is, its format, its size in bytes, and a stamp that changes with its content.

    The stamp is an entity tag or a commit where the file system has one, else the time of the last change. `header`
    says whether the first line of a table names its columns.
    """

    url: str
    kind: str
    size: int
    stamp: str
    header: bool = True

    @property
    def local(self) -> bool:
        """Return whether it is a file of this machine."""
        return not remote(self.url)

    @property
    def packed(self) -> bool:
        """Return whether it is read through gzip."""
        return self.url.lower().endswith(formats.GZ)

    @contextmanager
    def opened(self) -> Iterator[IO[bytes]]:
        """Open its bytes, unpacked where it is packed."""
        if self.local:
            with formats.opened(Path(self.url), self.url) as file:
                yield file
            return
        import fsspec

        with fsspec.open(self.url, "rb", compression="gzip" if self.packed else None) as file:
            yield file


def remote(name: str) -> bool:
    """Return whether a name is a URL that fsspec opens (hf://, s3://, https://)."""
    return "://" in name


def check(name: str, key: str) -> None:
    """Refuse a path or pattern that leads to no file, or to one of another format; a URL's format alone is looked at.

    Raises UserError. Imports nothing heavy.
    """
    _refuse_kind(formats.kind(Path(name)), f"{key}: {name}")
    if remote(name):
        return
    if not formats.found(path := Path(name).expanduser()):
        formats.refuse_missing(path, f"{key}: {name}")


def of_pattern(name: str, key: str, *, header: bool = True) -> tuple[File, ...]:
    """Return the files that a path, pattern or URL names, by name. Raises UserError where there is none."""
    path = Path(name).expanduser()
    if not remote(name):
        return tuple(_local(one, key, header) for one in formats.found(path))
    from datasets.data_files import resolve_pattern

    try:
        urls = resolve_pattern(name, base_path="")
    except Exception as error:  # whatever a file system raises: no such file, no network, no right
        raise UserError(f"{key}: {name}: cannot be found: {first_line(error)}") from error
    return tuple(_remote(url, formats.kind(Path(url)) or "", key, header) for url in sorted(urls))


def of_hub(source: schema.Source, key: str) -> tuple[File, ...]:
    """Return the files of one split of a hub data set. Raises UserError where they cannot be streamed or reached."""
    from datasets import load_dataset_builder

    assert source.hub is not None
    where = " ".join(filter(None, (source.hub, source.config, source.split)))
    try:
        with datasets_silent():
            builder = load_dataset_builder(source.hub, source.config, revision=source.revision)
    except Exception as error:  # the hub's clients raise anything from ConnectionError to plain ValueError
        raise UserError(f"{key}: {where}: cannot be reached: {first_line(error)}; next: files on this disk") from error
    builders = (BUILDERS[each.__name__] for each in type(builder).__mro__ if each.__name__ in BUILDERS)
    kind = _refuse_kind(next(builders, None), f"{key}: {where}")
    splits: dict[str, Any] = {str(name): urls for name, urls in (builder.config.data_files or {}).items()}
    if source.split not in splits:
        raise UserError(f"{key}: {source.hub} has no split '{source.split}'; there are: {', '.join(splits)}")
    urls = sorted(map(str, splits[source.split]))
    return tuple(_remote(url, kind, key, True) if remote(url) else _local(Path(url), key, True) for url in urls)


def _refuse_kind(kind: str | None, where: str) -> str:
    """Return the format of a file. Raises UserError for one that cannot be streamed."""
    if kind not in KINDS:
        raise UserError(f"{where}: cannot be streamed; allowed: {formats.allowed(KINDS)}, of text also .gz")
    return kind


def _local(path: Path, key: str, header: bool) -> File:
    kind, about = _refuse_kind(formats.kind(path), f"{key}: {path}"), path.stat()
    if about.st_size:
        formats.refuse_disguised(path, str(path))
    file = File(str(path), "jsonl" if kind == "json" else kind, about.st_size, str(about.st_mtime_ns), header)
    if kind == "json":
        with file.opened() as opened:
            begun = opened.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
        if begun.startswith(b"["):  # a list has no place from which its middle can be read
            new = path.with_name(f"{path.name.partition('.')[0]}.jsonl")
            way_on = f"jq -c '.[]' {formats.in_shell(path, unpacked=True)} > {formats.in_shell(new)}"
            raise UserError(f"{key}: {file.url}: one list of rows cannot be streamed; next: {way_on}")
    return file


def _remote(url: str, kind: str, key: str, header: bool) -> File:
    import fsspec

    _refuse_kind(kind, f"{key}: {url}")
    try:
        system, place = fsspec.core.url_to_fs(url)
        about = system.info(place)
    except Exception as error:
        raise UserError(f"{key}: {url}: cannot be reached: {first_line(error)}") from error
    stamps = (about.get(name) for name in ("ETag", "etag", "blob_id", "oid", "mtime", "LastModified", "last_modified"))
    stamp = next((str(one) for one in stamps if one), "")
    return File(url, "jsonl" if kind == "json" else kind, int(about.get("size") or 0), stamp, header)


@dataclass(frozen=True)
class FileSlice:
    """A part of the file numbered `file` that can be read alone: the lines that begin in bytes `start` to `end`, or row
    groups of Parquet. `end` is WHOLE where it is not known yet.
    """

    file: int
    start: int
    end: int


@dataclass(frozen=True)
class Assignment:
    """What one reader has of a pass: `slices` in the order in which it reads them, and of each slice the rows whose
    number leaves `remainder` when divided by `readers` (1 where no other reader has the slice).
    """

    slices: tuple[int, ...]
    readers: int
    remainder: int


def cut(files: Sequence[File]) -> tuple[FileSlice, ...]:
    """Return the slices of `files` in their order: row groups, spans of plain lines, whole files of anything else."""
    slices = []
    for number, file in enumerate(files):
        # A line of csv may be a part of a quoted text, and a line of gzip cannot be reached alone.
        if len(files) >= MANY or file.packed or file.kind in ("csv", "tsv"):
            slices.append(FileSlice(number, 0, WHOLE))
        elif file.kind == "parquet":
            with file.opened() as opened, formats.opened_parquet(opened, file.url) as table:
                groups = max(1, int(table.num_row_groups))
            slices += [FileSlice(number, group, group + 1) for group in range(groups)]
        else:
            # Rounded and not up: a file that is a little longer than a span stays whole.
            spans = max(1, round(file.size / SPAN))
            edges = [file.size * place // spans for place in range(spans + 1)]
            slices += [FileSlice(number, *edge) for edge in pairwise(edges)]
    return tuple(slices)


def assign(count: int, reader: int, readers: int, order: str) -> Assignment:
    """Return what `reader` of `readers` has of `count` slices in a pass that the text `order` shuffles.

    All readers together have each row of each slice once. Where there are fewer slices than readers, several readers
    read one slice and keep every second, third, … row of it.
    """
    places = list(range(count))
    random.Random(order).shuffle(places)
    if count >= readers:
        return Assignment(tuple(places[reader::readers]), 1, 0)
    mine = reader % count
    return Assignment((places[mine],), len(range(mine, readers, count)), reader // count)


# Rows of Parquet that are Python objects at a time.
AT_ONCE = 256
# Bytes at a file's beginning that tell how a table is written.
HEAD = 2**20
MARK = "\ufeff"
UNDECODED = "surrogateescape"


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
                for place, line, wrong in _lines(opened, file, piece, position):
                    if wrong:
                        yield place, Broken(wrong)
                    elif file.kind == "text":
                        yield place, {"text": line.rstrip("\r\n")}
                    elif line.strip():
                        yield place, _json(line)
            else:
                yield from _table(opened, file, piece, position)
    except (OSError, EOFError) as error:
        raise UserError(f"{file.url}: cannot be read: {error}") from error
    except Exception as error:
        # A file system's client raises errors of its own: httpx's, aiohttp's, botocore's.
        if file.local or type(error).__module__.partition(".")[0] in ("builtins", "hf_mps"):
            raise
        raise UserError(f"{file.url}: cannot be read: {first_line(error)}; next: the same command") from error


def _json(line: str) -> Raw | Broken:
    try:
        return json_rows.as_row(json_rows.parse(line.strip()))
    except json_rows.NotARow as error:
        return Broken(str(error))


def _table(opened: IO[bytes], file: File, piece: FileSlice, position: int | None) -> Rows:
    """Read separated values; the header is read anew wherever the rows begin."""
    head = b"".join(opened.readlines(HEAD)[: tables.LOOKED_AT]).decode("utf-8-sig", UNDECODED)
    beginning = io.StringIO(head, newline="").readlines()
    with tables.readable_errors(file.url):
        shape = tables.shape_of(lambda: nullcontext(iter(beginning)), file.kind, file.url, header=file.header)
    place, broken = position or 0, ""

    def lines() -> Iterator[str]:
        nonlocal place, broken
        for behind, line, wrong in _lines(opened, file, piece, place):
            place = behind
            if "\0" in line:  # Python's reader rejects it up to 3.10
                line, wrong = line.replace("\0", ""), "holds a NUL character"
            broken = broken or wrong
            yield line

    with tables.long_fields():
        rows = tables.rows(lines(), shape)
        if file.header and position is None:
            next(rows, None)
            if broken:
                raise UserError(f"{file.url}: its first line {broken}; allowed: text without, saved as UTF-8")
        for _, fields, wrong in rows:
            if broken or wrong:
                yield place, Broken(broken or wrong)
                broken = ""
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


def _lines(opened: IO[bytes], file: File, piece: FileSlice, position: int | None) -> Iterator[tuple[int, str, str]]:
    """Yield (the byte behind it, line, what is wrong with it) of the lines that begin within the slice, from byte
    `position` on.

    A carriage return ends a line, but not in JSON, as where the file is loaded whole.
    """
    # A line belongs to the slice in which it begins: the reader of that slice reads on to the line's end.
    inside, end = position is None and piece.start > 0, math.inf if piece.end == WHOLE else piece.end
    at = piece.start - inside if position is None else position
    opened.seek(at)
    for line in io.TextIOWrapper(opened, "utf-8", UNDECODED, "\n" if file.kind == "jsonl" else ""):
        if at >= end:
            return
        begun, size, wrong = at, len(line), ""
        if not line.isascii():
            try:
                size = len(line.encode())
            except UnicodeEncodeError:
                size, wrong = len(line.encode(errors=UNDECODED)), "is not UTF-8"
        at += size
        if begun >= piece.start:  # else it is the rest of a line that begins before
            yield at, line.removeprefix(MARK) if begun == 0 else line, wrong


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
    with file.opened() as opened:
        number = sum(1 for _ in _lines(opened, file, FileSlice(piece.file, 0, behind), None))
    return f"{file.url}: line {number}"
