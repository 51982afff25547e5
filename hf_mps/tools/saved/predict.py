"""A saved model's answers to rows without labels: as predictions.csv has them, batch by batch, to a file or stdout."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hf_mps.core import status
from hf_mps.core.errors import RunError, UserError, neighbour
from hf_mps.core.files import plain
from hf_mps.core.text import counted, duration
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.report.predictions import cell
from hf_mps.finetune.tasks._answering import Answering
from hf_mps.tools.saved import on_device, rows
from hf_mps.tools.saved.run import SavedRun

ROW = "row"
"""The column of answers that says which row of the input they are of, from 1."""
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
    of the input stand before the answers. Raises UserError for rows, files and models that cannot be used, RunError for
    a failure of the machine.
    """
    from hf_mps.finetune.run import measuring

    kind = _kind(kind, out)
    began, read = 0.0, 0
    with (
        rows.opened(run, source, keep) as given,
        on_device.answering(run, batch) as model,
        _written(out) as file,
        beside(out) as folder,
    ):
        answers = _answers(run, model.answering, probabilities)
        write = Writer(file, kind)
        began = time.monotonic()
        with status.shown("answering …"):
            for some, kept in given.with_kept(model.answering.at_a_time):
                found = folder.kept(answers(model.trainer, some))
                write(_beside(found, some, kept) if keep else found)
                measuring.forget_rows(model.trainer)
                read += len(some.dataset)
                status.now(f"answered {read:,} rows, {read / max(time.monotonic() - began, 1e-9):,.0f} a second …")
    seconds = time.monotonic() - began
    where = f" in {out}" if out is not None else ""
    speed = f"{read / seconds:,.1f} a second" if seconds > 0 else ""
    print(f"hf-mps: {counted(read, 'row')} answered in {duration(seconds)}, {speed}{where}", file=sys.stderr)
    return read


def _answers(run: SavedRun, answering: Answering, probabilities: bool) -> Callable[[Any, Rows], Iterable[Any]]:
    """Return what answers rows. Raises UserError where the probabilities of classes are asked for without any."""
    if not probabilities:
        return answering.answers
    if answering.every is None:
        raise UserError(f"--probabilities is of classes, and {run.task.value} answers without any; leave it out")
    return answering.every


def _beside(answers: Iterable[Mapping[str, Any]], some: Rows, kept: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    """Yield answers behind the columns `kept` of their rows: each names its row, or there is one for each.

    Raises UserError for a column that is called like one of the answers'.
    """
    by_number = {some.number(at): columns for at, columns in enumerate(kept)}
    for at, answer in enumerate(answers):
        columns = by_number[answer[ROW]] if ROW in answer else kept[at]
        if twice := next((name for name in columns if name in answer), None):
            raise UserError(f"--keep {twice}: the answers have a column '{twice}' of their own; leave it out")
        yield {**columns, **answer}


class Writer:
    """Writes answers as csv, under the names of the first ones' keys, or as JSON lines; what came is there at once."""

    def __init__(self, file: IO[str], kind: str) -> None:
        self._file = file
        self._kind = kind
        self._csv: Any = None

    def __call__(self, answers: Any) -> None:
        """Write some rows. Raises RunError for a key that the first ones did not have."""
        some = [dict(answer) for answer in answers]
        if self._kind == "jsonl":
            for answer in some:
                self._file.write(json.dumps(plain(answer), ensure_ascii=False) + "\n")
        elif some:
            self._as_csv(some)
        self._file.flush()

    def _as_csv(self, some: list[dict[str, Any]]) -> None:
        if self._csv is None:
            names = list(dict.fromkeys(name for answer in some for name in answer))
            self._csv = csv.DictWriter(self._file, names, lineterminator="\n")
            self._csv.writeheader()
        try:
            self._csv.writerows({name: cell(value) for name, value in answer.items()} for answer in some)
        except ValueError as error:  # a later row with a column more
            raise RunError(f"a csv has the columns of its first rows: {error}; next: --format jsonl") from error


def _kind(asked: str | None, out: Path | None) -> str:
    """Return csv or jsonl. Raises UserError for any other word, and for a file that exists or cannot be made."""
    named = out.suffix.lower().removeprefix(".") if out is not None else ""
    kind = asked or (named if out is not None else FORMATS[0])
    if kind not in FORMATS:
        came = f"--format {asked}" if asked else f"--out {out}: the name ends in {named and '.'}{named or 'nothing'}"
        raise UserError(f"{came}; allowed: {', '.join(FORMATS)}" + ("" if asked else ", or --format"))
    if out is not None:
        if out.exists():
            raise UserError(f"--out {out} is there already, and nothing is overwritten; next: another name")
        if not out.absolute().parent.is_dir():
            raise UserError(f"--out {out}: there is no such folder{neighbour(out.absolute().parent)}")
    return kind


@contextmanager
def _written(out: Path | None) -> Iterator[IO[str]]:
    """Give a file that is `out` once the context ended well, else not there; without `out` it is stdout."""
    if out is None:
        yield sys.stdout
        return
    work = hidden(out)
    try:
        with work.open("x", encoding="utf-8", newline="") as file:
            yield file
        # The finished file gets its name, unless another file has taken it meanwhile.
        try:
            os.link(work, out)  # unlike a rename, it takes no other file's place
        except FileExistsError as error:
            raise UserError(f"--out {out} is there by now, and nothing is overwritten; next: another name") from error
        except OSError:  # a file system without links
            work.rename(out)
    finally:
        with contextlib.suppress(OSError):
            work.unlink()


# Digits of a row's number in a file's name, so that a folder lists its rows in their order.
DIGITS = 6


@dataclass
class Folder:
    """Where pictures go: to `place` once one comes, and at the end to `whole`; nowhere without them."""

    place: Path | None = None
    whole: Path | None = None

    def kept(self, answers: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield answers with the path of each picture, from where the answers are, in its place, or without it.

        Raises UserError where the folder is there before.
        """
        from hf_mps.finetune.tasks._answering import Picture

        for answer in answers:
            found = {}
            for name, value in answer.items():
                if not isinstance(value, Picture):
                    found[name] = value
                elif self.place is not None and self.whole is not None:
                    file = f"{int(answer['row']):0{DIGITS}}.png"
                    self._write(self.place, self.whole, file, value.png)
                    found[name] = f"{self.whole.name}/{file}"
            yield found

    @staticmethod
    def _write(place: Path, whole: Path, file: str, content: bytes) -> None:
        if not place.is_dir():
            if whole.exists():
                raise UserError(f"--out: the pictures' folder {whole} is there already; next: another name")
            place.mkdir()
        (place / file).write_bytes(content)


@contextmanager
def beside(out: Path | None) -> Iterator[Folder]:
    """Give the folder of the pictures of the answers in `out`: masks.csv has those in masks.files.

    It is there, whole, once the context ended well, where any came.
    """
    if out is None:
        yield Folder()
        return
    whole = out.with_name(f"{out.stem}.files")
    place = hidden(whole)
    try:
        yield Folder(place, whole)
        if place.is_dir():
            place.rename(whole)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def hidden(path: Path) -> Path:
    """Return a name beside `path` that nothing has, for what is being written."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
