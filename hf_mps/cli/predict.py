"""`hf-mps predict`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_mps.cli.options import Batch, Debug, SavedModel, SavedTask, deferred
from hf_mps.core import status
from hf_mps.core.errors import UserError


@deferred
def predict(
    run: SavedModel,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE | -] [KEY=VALUE]...",
            help="Rows to answer: csv, jsonl, a text in each line, a picture; - is stdin. And keys of the recipe.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where the answers go; never over a file. Default: stdout."),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--format", help="csv or jsonl. Default: what --out is called, or csv.")
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also the probability of every class or label, not the best alone.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="COLUMN", help="A column of the input for the answers, an id; may be repeated."),
    ] = None,
    batch: Batch = None,
    task: SavedTask = None,
    debug: Debug = False,
) -> None:
    """Answer rows by a saved model, with the preprocessing of its training.

    The answers are those of a run's predictions.csv, with probabilities, a row for each row. Columns are called as in
    the model's own recipe; data.text=body names another one. Rows are read and answered in batches: memory stays flat.
    The masks of image-segmentation are PNG files beside --out (answers.csv has answers.files/000001.png): the number of
    a class in each pixel, with a palette.
    """
    from hf_mps.tools.saved.run import open_run

    files = [word for word in words or () if "=" not in word or Path(word).exists()]
    if len(files) > 1:
        raise UserError(f"predict has {files[0]} and {files[1]}; give one file, or - and both on stdin")
    saved = open_run(run, task).with_words([word for word in words or () if word not in files])
    with status.shown("loading PyTorch …"):
        from hf_mps.tools.saved.predict import predict as answer

        answer(
            saved,
            files[0] if files else "-",
            out,
            kind=kind,
            batch=batch,
            probabilities=probabilities,
            keep=tuple(dict.fromkeys(keep or ())),
        )
