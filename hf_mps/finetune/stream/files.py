"""The files behind streamed rows: patterns, URLs and hub data sets as `datasets` resolves them; none is read."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hf_mps.core.errors import UserError, neighbour
from hf_mps.core.text import first_line
from hf_mps.finetune.data import formats
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.run.logging import datasets_silent

KINDS = ("parquet", "json", "jsonl", "csv", "tsv", "text")
# The builders of `datasets` that read such files, and the format that each stands for. Of a hub data set it is one of
# their subclasses, with a name of its own (datasets' builder.py, `configure_builder_class`).
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
        """Whether it is a file of this machine."""
        return "://" not in self.url

    @property
    def packed(self) -> bool:
        """Whether it is read through gzip."""
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
    """Whether a name is a URL that fsspec opens (hf://, s3://, https://)."""
    return "://" in name


def check(name: str, key: str) -> None:
    """Refuse a path or pattern that leads to no file, or to one of another format; a URL's format alone is looked at.

    Raises UserError. Imports nothing heavy.
    """
    kind = formats.kind(Path(name))
    if kind not in KINDS:
        raise UserError(f"{key}: {name}: rows are streamed from {formats.allowed(KINDS)}, those of text also as .gz")
    if remote(name):
        return
    path = Path(name).expanduser()
    if not _found(path):
        raise UserError(f"{key}: {name}: there is no such file{neighbour(path)}")


def of_pattern(name: str, key: str, *, header: bool = True) -> tuple[File, ...]:
    """Return the files that a path, pattern or URL names, by name. Raises UserError where there is none."""
    path = Path(name).expanduser()
    if not remote(name):
        return tuple(_local(one, name, key, header) for one in _found(path))
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
    kind = next((BUILDERS[each.__name__] for each in type(builder).__mro__ if each.__name__ in BUILDERS), None)
    if kind is None:
        raise UserError(f"{key}: {where}: rows are streamed from {formats.allowed(KINDS)}, and this set has others")
    splits: dict[str, Any] = dict(builder.config.data_files or {})
    names = {str(name): urls for name, urls in splits.items()}
    if source.split not in names:
        raise UserError(f"{key}: {source.hub} has no split '{source.split}'; there are: {', '.join(names)}")
    urls = sorted(map(str, names[source.split]))
    return tuple(_remote(url, kind, key, True) if remote(url) else _local(Path(url), url, key, True) for url in urls)


def fingerprint(files: Sequence[File]) -> str:
    """Return a digest of which files there are: their names, sizes and stamps, not their content."""
    listed = repr([(Path(file.url).name, file.size, file.stamp) for file in files])
    return hashlib.blake2b(listed.encode(), digest_size=16).hexdigest()


def _found(path: Path) -> list[Path]:
    """Return the file `path`, or those that it is a pattern of, by name."""
    if path.is_file():
        return [path]
    # Path.glob takes no absolute pattern.
    return sorted(Path(one) for one in glob.glob(str(path), recursive=True) if Path(one).is_file())  # noqa: PTH207


def _local(path: Path, name: str, key: str, header: bool) -> File:
    kind = formats.kind(path)
    if kind not in KINDS:
        raise UserError(f"{key}: {path}: rows are streamed from {formats.allowed(KINDS)}; next: a pattern without it")
    about = path.stat()
    if about.st_size:
        formats.refuse_disguised(path, str(path))
    file = File(str(path), "jsonl" if kind == "json" else kind, about.st_size, str(about.st_mtime_ns), header)
    if kind == "json":
        _refuse_array(file, key)
    return file


def _remote(url: str, kind: str, key: str, header: bool) -> File:
    import fsspec

    if kind not in KINDS:
        raise UserError(f"{key}: {url}: rows are streamed from {formats.allowed(KINDS)}; next: a pattern without it")
    try:
        system, place = fsspec.core.url_to_fs(url)
        about = system.info(place)
    except Exception as error:
        raise UserError(f"{key}: {url}: cannot be reached: {first_line(error)}") from error
    stamps = (about.get(name) for name in ("ETag", "etag", "blob_id", "oid", "mtime", "LastModified", "last_modified"))
    stamp = next((str(one) for one in stamps if one), "")
    return File(url, "jsonl" if kind == "json" else kind, int(about.get("size") or 0), stamp, header)


def _refuse_array(file: File, key: str) -> None:
    """Raise UserError for JSON that is one list of rows: it has no place to begin in its middle."""
    with file.opened() as opened:
        begun = opened.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")
    if begun.startswith(b"["):
        way_on = f"jq -c '.[]' {file.url} > {Path(file.url).with_suffix('.jsonl')}"
        raise UserError(f"{key}: {file.url}: one list of rows cannot be streamed; next: {way_on}")
