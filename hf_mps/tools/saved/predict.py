"""Predicts rows without labels with a saved model, batch by batch, as predictions.csv has them.

The rows of a file, of standard input or of a folder are read a few at a time.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from hf_mps.core import status
from hf_mps.core.errors import RunError, UserError, brief, neighbour, user_path
from hf_mps.core.files import plain, refuse_unwritable
from hf_mps.core.text import counted, duration
from hf_mps.finetune.data import formats, load
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.report.predictions import cell
from hf_mps.finetune.tasks import Picture, Prepared
from hf_mps.finetune.text import tokens
from hf_mps.tools.saved.run import SavedRun, answer_in_utf8, forget_rows, on_device, say, trainer_of

if TYPE_CHECKING:
    import pyarrow

ROW = "row"
"""The column with the number of the input's row, from 1."""
FORMATS = ("csv", "jsonl")


def predict(
    run: SavedRun,
    source: str,
    out: Path | None = None,
    *,
    kind: str | None = None,
    batch: int | None = None,
    probabilities: bool = False,
    keep: Sequence[str] = (),
) -> int:
    """Answer the rows of `source` (a file, a folder of pictures or sound, `-`) and return how many there were.

    The answers go to `out`, which appears once all are there, or to stdout as they come; as csv or jsonl (`kind`; by
    default what `out` is called, and csv). Answers that are pictures go to a folder beside `out`, and nowhere without
    it. At most `batch` rows are computed at once. With `probabilities` there is that of every class; the columns `keep`
    of the input come before the answers. Raises UserError for rows, files and models that cannot be used, RunError for
    a failure of the machine.
    """
    out = out and user_path(out)
    kind = _kind(kind, out)
    began, read = 0.0, 0
    with (  # the output first: a model takes long to load
        _written(out) as (file, pictures),
        opened(run, source, keep) as given,
        answering(run, batch) as (made, trainer),
    ):
        if probabilities and not made.task.has_probabilities:
            raise UserError(f"--probabilities is for classes, which {run.task.value} does not predict; leave it out")
        write = Writer(file, kind)
        began = time.monotonic()
        with status.shown("answering …"):
            for some, kept in given.batches(made.task.at_a_time):
                found = pictures.kept(made.answers(trainer, some, probabilities))
                write(_beside(found, some, kept) if keep else found)
                forget_rows(trainer)
                read += len(some.dataset)
                status.now(f"answered {read:,} rows, {read / max(time.monotonic() - began, 1e-9):,.0f} a second …")
    seconds = time.monotonic() - began
    where = f" in {out}" if out is not None else ""
    speed = f"{read / seconds:,.1f} a second" if seconds > 0 else ""
    print(f"hf-mps: {counted(read, 'row')} answered in {duration(seconds)}, {speed}{where}", file=sys.stderr)
    return read


@contextmanager
def answering(run: SavedRun, batch: int | None = None) -> Iterator[tuple[Prepared, Any]]:
    """Load the model of `run` onto its device, and give it with a trainer that answers `batch` rows at once.

    Prints a line about it on stderr. Raises UserError for a model that cannot be used, RunError for a failure of the
    machine.
    """
    with on_device(run) as (run, device, folder, weights), status.shown("loading the model …"):
        made = run.task_class(run.to_use, run.checkpoint, device.value).open(run.chosen)
        trainer, chosen = trainer_of(made, run.to_use, device, folder, run.chosen, batch)
        say(run, device, {**chosen, **weights})
        status.over()
        yield made, trainer


def _beside(answers: Iterable[Mapping[str, Any]], some: Rows, kept: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield answers after the columns `kept` of their rows: answers name their rows, or every row has one.

    Raises UserError for a column that has the name of one of the answers'.
    """
    by_number = {some.number(at): columns for at, columns in enumerate(kept)}
    for at, answer in enumerate(answers):
        columns = by_number[answer[ROW]] if ROW in answer else kept[at]
        if twice := next((name for name in columns if name in answer), None):
            raise UserError(f"--keep {twice}: the answers already have a column '{twice}'; leave it out")
        yield {**columns, **answer}


class Writer:
    """Writes answers as csv with the columns of the first rows, or as JSON lines, and flushes them."""

    def __init__(self, file: IO[str], kind: str) -> None:
        self._file, self._kind = file, kind
        self._csv: Any = None

    def __call__(self, answers: Any) -> None:
        """Write some rows. Raises RunError for a key that the first ones did not have."""
        some = [dict(answer) for answer in answers]
        if self._kind == "jsonl":
            for answer in some:
                self._file.write(json.dumps(plain(answer), ensure_ascii=False) + "\n")
        elif some:
            if self._csv is None:
                names = list(dict.fromkeys(name for answer in some for name in answer))
                self._csv = csv.DictWriter(self._file, names, lineterminator="\n")
                self._csv.writeheader()
            try:
                self._csv.writerows({name: cell(value) for name, value in answer.items()} for answer in some)
            except ValueError as error:  # a later row with a column more
                problem = f"a csv cannot add columns after its first rows: {error}"
                raise RunError(f"{problem}; next: --format jsonl") from error
        self._file.flush()


def _kind(asked: str | None, out: Path | None) -> str:
    """Return csv or jsonl. Raises UserError for any other word, and for a file that exists or cannot be made."""
    if out is not None and out.is_dir():
        raise UserError(f"--out {out} is a folder; next: --out {out / 'answers.csv'}")
    named = out.suffix.lower().removeprefix(".") if out is not None else ""
    kind = asked or (named if out is not None else FORMATS[0])
    if kind not in FORMATS:
        came = f"--format {asked}" if asked else f"--out {out}: the name ends in {named and '.'}{named or 'nothing'}"
        raise UserError(f"{came}; allowed: {', '.join(FORMATS)}" + ("" if asked else ", or --format"))
    if out is not None:
        if out.exists():
            raise UserError(f"--out {out} exists already and is never overwritten; give another name")
        if not out.absolute().parent.is_dir():
            raise UserError(f"--out {out}: there is no such folder{neighbour(out.absolute().parent)}")
    return kind


@dataclass
class Pictures:
    """Writes pictures among the answers into `work`, which becomes the folder `whole`; drops them without a folder."""

    work: Path | None = None
    whole: Path | None = None

    def kept(self, answers: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield answers with the path of a picture, relative to the answers, in its place, or without the picture.

        Raises UserError for a folder that exists already.
        """
        for answer in answers:
            found = {name: value for name, value in answer.items() if not isinstance(value, Picture)}
            for name in answer.keys() - found.keys():
                if self.work is None or self.whole is None:
                    continue
                if self.whole.exists():
                    raise UserError(f"--out: the folder of the pictures {self.whole} exists already; give another name")
                # In six digits, so that a folder lists its rows in their order.
                file = f"{int(answer[ROW]):06}.png"
                self.work.mkdir(exist_ok=True)
                (self.work / file).write_bytes(answer[name])
                found[name] = f"{self.whole.name}/{file}"
            yield found


@contextmanager
def _written(out: Path | None) -> Iterator[tuple[IO[str], Pictures]]:
    """Give a file that is `out` once the context ended well, else not there; without `out` it is stdout.

    The pictures of masks.csv are then in the folder masks.files beside it.
    """
    if out is None:
        if sys.stdout is None:  # Python's value for a stdout that the shell closed (`>&-`)
            raise UserError("stdout is closed, and the answers go there; next: --out FILE")
        answer_in_utf8()
        yield sys.stdout, Pictures()
        return
    refuse_unwritable(out, f"--out {out}")
    with tempfile.TemporaryDirectory(prefix=f".{out.name[:100]}.", dir=out.absolute().parent) as folder:
        work, whole = Path(folder, "answers"), out.with_name(f"{out.stem}.files")
        pictures = Path(folder, "pictures")
        # In a folder beside it, so that a killed command leaves nothing under the name that was asked for.
        with work.open("x", encoding="utf-8", newline="") as file:
            yield file, Pictures(pictures, whole)
        # Before the answers, which name its files.
        if pictures.is_dir():
            pictures.rename(whole)
        # The finished file gets its name, unless another file has taken it meanwhile.
        try:
            # Unlike a rename, a link takes no other file's place.
            os.link(work, out)
        except FileExistsError as error:
            raise UserError(f"--out {out} exists by now and is never overwritten; give another name") from error
        except OSError:  # a file system without links
            work.rename(out)


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
        """Return the columns to read: without those that may be missing and are. Raises UserError where none is left,
        and for `keep`.
        """
        there = rows.dataset.column_names
        for name in self.keep:
            if name not in there:
                shown = ", ".join(map(brief, there))
                raise UserError(f"{self.name}: there is no column '{name}' for --keep; allowed: {shown}")
        nested = {name.partition(".")[0] for name in there} | set(there)
        absent = [role for role in self.optional if self.columns.get(role, "").partition(".")[0] not in nested]
        present = {role: column for role, column in self.columns.items() if role not in absent}
        if not present:
            wanted, came = ", ".join(self.columns.values()), ", ".join(map(brief, there))
            way_on = f"next: data.{absent[0]}=NAME for the one that it is"
            raise UserError(f"{self.name}: there is none of the columns {wanted}; the columns are {came}; {way_on}")
        return present

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
