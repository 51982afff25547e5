"""Predicts rows without labels with a saved model, batch by batch, as predictions.csv has them."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hf_mps.core import status
from hf_mps.core.errors import RunError, UserError, neighbour, user_path
from hf_mps.core.files import plain, refuse_unwritable
from hf_mps.core.text import counted, duration
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.report.predictions import cell
from hf_mps.finetune.run import measuring
from hf_mps.finetune.tasks import Picture, Prepared
from hf_mps.tools.saved import on_device, rows
from hf_mps.tools.saved.run import SavedRun

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
        rows.opened(run, source, keep) as given,
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
                measuring.forget_rows(trainer)
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
    with on_device.on_device(run) as (run, device, folder, weights), status.shown("loading the model …"):
        made = run.task_class(run.to_use, run.checkpoint, device.value).open(run.chosen)
        trainer, chosen = measuring.trainer(made, run.to_use, device, folder, run.chosen, batch)
        on_device.say(run, device, {**chosen, **weights})
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
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # as in a file, whatever the locale
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
