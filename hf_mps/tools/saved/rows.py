"""Rows to be answered: of a file, of standard input or of a folder, read a few at a time, without their labels."""

from __future__ import annotations

import csv
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, brief, user_path
from hf_mps.finetune.data import formats, load
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.text import tokens
from hf_mps.tools.saved.run import SavedRun

if TYPE_CHECKING:
    import pyarrow

STDIN = "-"
MEDIA = ("image", "audio")
"""The roles whose columns hold files."""
WORDS = "words"
# Bytes of a first line that are read for a csv's header.
LOOKED_AT = 1 << 16


@dataclass(frozen=True)
class Input:
    """The rows in a file, read when asked for: `kind` is one of `formats`, `files` are single pictures or sound.

    `columns` are those of the task by their roles, without the truth; `optional` ones may be missing. `keep` are
    columns that go from the input into the answers. Paths in the rows are relative to `folder`, by default the file's.
    """

    path: Path
    name: str
    kind: str
    columns: Mapping[str, str]
    optional: tuple[str, ...]
    data: schema.Data
    files: tuple[Path, ...] = ()
    keep: tuple[str, ...] = ()
    folder: Path | None = None

    def batches(self, size: int) -> Iterator[tuple[Rows, list[dict[str, Any]]]]:
        """Yield the rows, `size` at a time, with the columns `keep` of each row as the input has them.

        Raises UserError for what cannot be read, missing columns, and no rows.
        """
        first = 0
        columns: Mapping[str, str] = {}
        for table in self._tables(size):
            # A table without rows is gone through once: its columns are looked at before it is called empty.
            for start in range(0, max(1, len(table)), size):
                rows = self._rows(table.slice(start, size), first)
                columns = columns or self._present(rows)
                if len(rows.dataset):
                    kept = rows.dataset.select_columns(list(self.keep)).to_list() if self.keep else []
                    yield _split_words(load.narrow(rows, columns, self.data)), kept
                first += len(rows.dataset)
        if not first:
            raise UserError(f"{self.name}: {formats.NO_ROWS}")

    def _present(self, rows: Rows) -> dict[str, str]:
        """Return the columns to read: without those that may be missing and are. Raises UserError for `keep`."""
        there = rows.dataset.column_names
        for name in self.keep:
            if name not in there:
                shown = ", ".join(map(brief, there))
                raise UserError(f"{self.name}: there is no column '{name}' for --keep; allowed: {shown}")
        nested = {name.partition(".")[0] for name in there} | set(there)
        absent = [role for role in self.optional if self.columns.get(role, "").partition(".")[0] not in nested]
        return {role: column for role, column in self.columns.items() if role not in absent}

    def _tables(self, size: int) -> Iterator[pyarrow.Table]:
        """Yield the rows as they come; of single files `size` at a time."""
        import pyarrow

        if self.files:
            column = next(self.columns[role] for role in MEDIA if role in self.columns)
            for start in range(0, len(self.files), size):
                yield pyarrow.table({column: [str(file) for file in self.files[start : start + size]]})
        elif self.kind == "text":
            needed = [column for role, column in self.columns.items() if role not in self.optional]
            needed = needed or list(self.columns.values())[:1]
            if len(needed) != 1:
                named = ", ".join(map(brief, needed))
                raise UserError(f"{self.name}: a line of text is one column, a row has {named}; allowed: csv, jsonl")
            for table in load.reading(self.data, self.path, self.name, self.kind).make():
                yield table.rename_columns(needed)
        else:
            named_columns = (*self.columns.values(), *self.keep)
            yield from load.reading(self.data, self.path, self.name, self.kind, named_columns).make()

    def _rows(self, table: pyarrow.Table, first: int) -> Rows:
        from datasets import Dataset
        from datasets.table import InMemoryTable

        # A random fingerprint: the default hashes the rows, and nothing looks them up again.
        dataset = Dataset(InMemoryTable(table), fingerprint=secrets.token_hex(8))
        numbers = tuple(range(first, first + len(dataset)))
        textual, folder = self.kind in load.TABLES, self.folder or self.path.parent
        return Rows(load.undecoded(dataset), self.name, textual=textual, numbers=numbers, folder=folder)


@contextmanager
def opened(run: SavedRun, name: str, keep: Sequence[str] = ()) -> Iterator[Input]:
    """Give the rows in the file, folder, pipe or `-` (standard input) called `name` for the model of `run`.

    Standard input, or a pipe, is kept in a temporary file while the context lasts: its first line tells what it is, and
    JSON is gone through twice. The columns `keep` are read beside the task's. Raises UserError for what is not there,
    is empty, or of no format that is read.
    """
    task, data = run.task_class, run.recipe.data
    roles, optional = {**task.asked, **data.columns.roles()}, task.optional
    # A role that has several columns numbers them: label_0, label_1, … What only labelled rows have is not read.
    columns = {role: name for role, name in roles.items() if role.rstrip("0123456789").rstrip("_") not in task.truth}
    called, pipe = "stdin" if name == STDIN else name, user_path(name)
    if name != STDIN and not pipe.is_fifo():  # `<(zcat rows.csv.gz)` is a pipe
        yield replace(_found(name, columns, optional, data), keep=tuple(keep))
        return
    if name == STDIN and sys.stdin is None:  # Python's value for a stdin that the shell closed (`<&-`)
        raise UserError("stdin is closed, and the rows come from there; next: a FILE in place of -")
    if name == STDIN and sys.stdin.isatty():
        print("hf-mps: reads rows from the keyboard; Ctrl-D ends them", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="hf-mps-stdin-") as folder:
        whole = Path(folder, "rows")
        with whole.open("wb") as copy, nullcontext(sys.stdin.buffer) if name == STDIN else pipe.open("rb") as source:
            shutil.copyfileobj(source, copy)
        if not whole.stat().st_size:
            raise UserError(f"{called}: {formats.NO_ROWS}")
        kind = _told_by_its_first_line(whole, [column for role, column in columns.items() if role not in optional])
        path = whole.rename(whole.with_name(f"rows.{'txt' if kind == 'text' else kind}"))
        yield Input(path, called, kind, columns, optional, data, keep=tuple(keep), folder=Path.cwd())


def _found(name: str, columns: Mapping[str, str], optional: tuple[str, ...], data: schema.Data) -> Input:
    """Return the rows in a file or folder. Raises UserError."""
    path = user_path(name)
    media = [role for role in columns if role in MEDIA]
    alone = bool(media) and set(columns) - set(optional) == set(media)
    if path.is_dir():
        if not alone:
            raise UserError(f"{name} is a folder; allowed: a file of rows ({formats.allowed()}), or - for stdin")
        column, files, _ = load.media(path)
        if column != media[0]:
            raise UserError(f"{name} holds files of {column}; allowed: {media[0]}")
        return Input(path, name, "", columns, optional, data, tuple(file.resolve() for file in files))
    formats.refuse_missing(path, name)
    kind = formats.kind(path)
    if kind is None and alone:
        return Input(path, name, "", columns, optional, data, (path.resolve(),))
    if kind is None:
        raise UserError(f"{name}: its name has no known ending; allowed: {formats.allowed()}, or - for stdin")
    formats.refuse_disguised(path, name)
    return Input(path, name, kind, columns, optional, data)


def _told_by_its_first_line(path: Path, columns: list[str]) -> str:
    """Return the format of a file without a name: JSON lines, a csv whose header has the columns, or lines of text."""
    with path.open("rb") as file:
        # csv refuses a line with a carriage return in it, with which old spreadsheets of the Mac end their lines.
        line = file.readline(LOOKED_AT).decode("utf-8-sig", errors="replace").partition("\r")[0].strip()
    if line.startswith("{"):
        return "jsonl"
    if line.startswith("["):
        return "json"
    for kind, separator in (("tsv", "\t"), ("csv", ","), ("csv", ";")):
        header = next(csv.reader([line], delimiter=separator), [])
        if set(columns) <= set(header) and (separator in line or len(columns) == 1):
            return kind
    return "text"


def _split_words(rows: Rows) -> Rows:
    """Return the rows with lists of words where they hold sentences: split at white space, as CoNLL's are."""
    if getattr(rows.dataset.features.get(WORDS), "dtype", None) not in tokens.TEXT:
        return rows
    from datasets import Dataset

    columns: dict[str, Any] = rows.dataset[:]
    return rows.with_columns(Dataset.from_dict({**columns, WORDS: [(text or "").split() for text in columns[WORDS]]}))
