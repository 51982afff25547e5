"""The files behind streamed rows, and the slices that readers share.

`datasets` resolves patterns, URLs and hub data sets; no row is read here.
"""

from __future__ import annotations

import glob
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune.data import formats
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
    if not _found(path := Path(name).expanduser()):
        formats.refuse_missing(path, f"{key}: {name}")


def of_pattern(name: str, key: str, *, header: bool = True) -> tuple[File, ...]:
    """Return the files that a path, pattern or URL names, by name. Raises UserError where there is none."""
    path = Path(name).expanduser()
    if not remote(name):
        return tuple(_local(one, key, header) for one in _found(path))
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


def _found(path: Path) -> list[Path]:
    """Return the file `path`, or those that it is a pattern of, by name."""
    if path.is_file():
        return [path]
    # Path.glob takes no absolute pattern.
    return sorted(Path(one) for one in glob.glob(str(path), recursive=True) if Path(one).is_file())  # noqa: PTH207


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
