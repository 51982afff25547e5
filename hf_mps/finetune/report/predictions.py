"""predictions.csv: the kept model's answers to the validation rows, and a task's pictures of them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_mps.core.files import plain, write_atomic
from hf_mps.finetune.run import failures
from hf_mps.finetune.tasks import Prepared

FILE = "predictions.csv"


class Written(NamedTuple):
    """The files beside the model, predictions.csv and then its pictures, and the answer that all rows share."""

    files: list[Path]
    answer: str | None = None


def write(output: Path, prepared: Prepared, trainer: Any) -> Written:
    """Write what the task offers into `output`, each file atomically; no file where the task predicts nothing.

    A picture that fails is left out.

    Raises whatever the task's `predict` does, and OSError where the disk refuses.
    """
    if prepared.predict is None:
        return Written([])
    rows = [dict(row) for row in prepared.predict(trainer)]
    files = [write_atomic(output / FILE, text(rows))]
    with failures.optional("a picture of the predictions"):
        drawn = prepared.figures(rows) if prepared.figures is not None else {}
        files += [write_atomic(output / name, png) for name, png in drawn.items()]
    return Written(files, only_answer(rows))


def take_part(prepared: Prepared, trainer: Any) -> None:
    """Predict the rows of a process other than the main one, which writes the answers of all."""
    if prepared.predict is not None:
        with failures.optional(FILE):
            # Answers are computed as they are taken.
            for _ in prepared.predict(trainer):
                pass


def only_answer(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the only answer in `rows` of predictions.csv; None where answers differ, or where all truths are equal."""

    def distinct(*names: str) -> set[str]:
        return {str(row[name]) for row in rows for name in names if name in row}

    answers, truths = distinct("prediction", "generated"), distinct("label", "truth", "reference")
    return answers.pop() if len(rows) > 1 and len(answers) == 1 and len(truths) != 1 else None


def text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows without their pictures as csv with a header of all keys; lists and dicts as JSON, gaps empty."""
    rows = [{name: value for name, value in row.items() if not isinstance(value, bytes)} for row in rows]
    names = list(dict.fromkeys(name for row in rows for name in row))
    written = io.StringIO()
    lines = csv.DictWriter(written, names, lineterminator="\n")
    lines.writeheader()
    for row in rows:
        lines.writerow({name: cell(value) for name, value in row.items()})
    return written.getvalue()


def cell(value: Any) -> Any:
    """Return a value as a csv has it: lists and dicts as JSON."""
    simple = plain(value)
    return json.dumps(simple, ensure_ascii=False) if isinstance(simple, (list, dict)) else simple
