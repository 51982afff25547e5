"""The rows of one split, where a person finds each of them, and what was read once.

That is cached below the user's HF_HOME as Arrow, under a digest of the file and how it was read.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, brief

if TYPE_CHECKING:
    import pyarrow
    from datasets import Dataset

    from hf_mps.finetune.stream.streamed import Stream


# Roles whose columns hold files, or lists of them.
MEDIA = ("image", "images", "mask", "audio")


@dataclass(frozen=True)
class Rows:
    """The rows of one split, its columns renamed to their roles ("text", "label", …).

    `where` names the split to a person; `textual` says that every value is text, as in a csv, numbers too.
    Paths of images and sound are relative to `folder`, that of the rows' file. `notes` say what a person may want to
    know of how the rows were read. Where the rows are streamed, `stream` reads them all and `dataset` holds the first.
    """

    dataset: Dataset
    where: str
    textual: bool = False
    numbers: tuple[int, ...] | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    stream: Stream | None = None

    @property
    def origin(self) -> str:
        """The origin of the rows, with the notes."""
        return f"{self.where} ({'; '.join(self.notes)})" if self.notes else self.where

    def number(self, index: int) -> int:
        """Return a row's place in its source, from 1 after any header, whatever sample was drawn."""
        return (self.numbers[index] if self.numbers is not None else index) + 1

    def place(self, index: int) -> str:
        """Return where a person finds a row: `train.csv: row 3`."""
        return f"{self.where}: row {self.number(index)}"

    def sample(self, indices: list[int], where: str | None = None) -> Rows:
        """Return only the rows at `indices`, in that order."""
        numbers = tuple(self.number(index) - 1 for index in indices)
        return replace(self, dataset=self.dataset.select(indices), where=where or self.where, numbers=numbers)

    def with_columns(self, dataset: Dataset) -> Rows:
        """Return the same rows in the same order with other columns."""
        return replace(self, dataset=dataset)

    def path(self, value: str) -> Path:
        """Return the file that a row names; it is relative to the folder of the rows' own file, never to the user's."""
        path = Path(value).expanduser()
        return path if path.is_absolute() or self.folder is None else self.folder / path

    def stamps(self) -> Iterator[tuple[int, int]]:
        """Yield size and last change of each file that the rows name, of those that are there.

        What is made of rows depends on them, and the names stay as they are where a file is replaced.
        """
        for role in (role for role in MEDIA if role in self.dataset.column_names):
            kind = self.dataset.features[role]
            if getattr(getattr(kind, "feature", kind), "dtype", "") == "string":
                for value in self.dataset[role]:
                    for name in value if isinstance(value, list) else [value]:
                        with contextlib.suppress(OSError, RuntimeError, ValueError, TypeError):  # told by `content_of`
                            about = self.path(name).stat()
                            yield about.st_size, about.st_mtime_ns

    def content_of(self, value: Any, index: int, role: str) -> bytes:
        """Return the encoded image or sound that `value` is, of column `role` in row `index` or in its list.

        It is a path, or {"bytes", "path"} as in Parquet. Raises UserError, naming the row, for a gap and for a file
        that is missing or cannot be read.
        """
        where = self.place(index)
        name = value.get("path") if isinstance(value, dict) else value
        if isinstance(value, dict) and value.get("bytes") is not None:
            return bytes(value["bytes"])
        if not name:
            raise UserError(f"{where} has no {role}; allowed: one in every row")
        if not isinstance(name, str):
            raise UserError(f"{where}: {role} is a {type(name).__name__}; allowed: a path, or bytes as in Parquet")
        if "://" in name:
            raise UserError(f"{where}: {role}: {brief(name)} is an address; allowed: the path of a file here")
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError as error:
            raise UserError(f"{where}: {role}: {self.path(name)}: there is no such file") from error
        except (OSError, ValueError, RuntimeError) as error:  # a path with a NUL; the home of ~nobody
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{where}: {role}: {brief(name)}: cannot be read: {why}; allowed: a file's path") from error


# Rows of one table: enough for Arrow to be fast, few enough to be held as Python objects.
ROWS = 10_000
BLOCK = 1 << 20

Tables = Iterator["pyarrow.Table"]


def in_tables(
    rows: Iterable[Sequence[Any]],
    columns: Mapping[str, Any],
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Tables:
    """Yield `rows`, each with a value for every one of `columns` ({name: Arrow's type, None for text}), as tables.

    There is at least one table. A table's rows are read within `around`.
    """
    import pyarrow

    schema = pyarrow.schema([(name, kind or pyarrow.string()) for name, kind in columns.items()])
    rows = iter(rows)
    while True:
        with around():
            some = list(islice(rows, ROWS))
        values = zip(*some, strict=True) if some else ([] for _ in schema)
        yield pyarrow.table([pyarrow.array(*one) for one in zip(values, schema.types, strict=True)], schema=schema)
        if len(some) < ROWS:
            return


def cached(path: Path, read_options: Sequence[Any], make: Callable[[], Tables]) -> Dataset:
    """Return the rows of the file `path` as `make` reads them; `make` runs only for content that was not yet read so.

    `read_options` is all that `make` depends on beside its code and the file's content, as plain values. Raises OSError
    for a full disk, and what `make` raises; neither leaves a file behind.
    """
    from datasets import Dataset, config

    content = hashlib.sha256(repr((code_digest(make), *read_options)).encode())
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            content.update(block)
    digest = content.hexdigest()[:32]
    rows_file = Path(config.HF_DATASETS_CACHE) / "hf_mps" / digest / "rows.arrow"
    if not rows_file.is_file():
        _write(rows_file, make())
    dataset = Dataset.from_file(str(rows_file))
    # Named by content: what a task makes of the rows is found again wherever the file is.
    dataset._fingerprint = digest
    return dataset


def code_digest(function: Callable[..., Any]) -> str:
    """Hash the sources of the package that `function` belongs to: a cache of its results has to be keyed by its code.

    All of them, so that whatever the function calls is in it. `datasets.fingerprint.Hasher` would pickle an imported
    helper by its name, and its code may change. The digest is the same wherever the package is installed.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return _package_digest(function.__module__.partition(".")[0])


@functools.cache
def _package_digest(package: str) -> str:
    file = getattr(sys.modules[package], "__file__", None)
    if file is None:  # typed at the prompt
        return ""
    folder, content = Path(file).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return content.hexdigest()


def _write(path: Path, chunks: Tables) -> None:
    """Write Arrow's stream format, which `datasets` memory-maps. A table without rows gives it the column names."""
    import pyarrow

    tables, root = iter(chunks), path.parent.parent
    first = next(tables)
    root.mkdir(parents=True, exist_ok=True)
    # A folder that no other process has: two may read one file at once; the last to finish wins, with equal rows.
    with tempfile.TemporaryDirectory(dir=root) as folder:
        hidden = Path(folder, path.name)
        with pyarrow.OSFile(str(hidden), "wb") as sink, pyarrow.ipc.new_stream(sink, first.schema) as writer:
            writer.write_table(first)
            for table in tables:
                writer.write_table(table)
        path.parent.mkdir(exist_ok=True)
        hidden.replace(path)
