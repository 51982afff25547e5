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
            help="The rows: csv, jsonl, a text in each line, an image or sound; - is stdin. KEY=VALUE changes keys.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the answers to this new file. Default: stdout.")
    ] = None,
    kind: Annotated[str | None, typer.Option("--format", help="csv or jsonl. Default: as --out ends, or csv.")] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Also write the probability of every class or label.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="COLUMN", help="Copy this column of the rows to the answers; may be repeated."),
    ] = None,
    batch: Batch = None,
    task: SavedTask = None,
    debug: Debug = False,
) -> None:
    """Predict the answers to new rows with a saved model, prepared as in its training.

    The rows need the columns of the model's recipe; data.text=body names another column. Rows are read and answered in
    batches, so files of any size fit. The masks of image-segmentation become PNG files beside --out
    (answers.files/000001.png beside answers.csv), whose pixels are numbers of classes.

    Example: `echo '{"sentence1": "He eats.", "sentence2": "He is eating."}' | hf-mps predict runs/quickstart -`
    """
    from hf_mps.tools.saved.run import open_run

    files = [word for word in words or () if "=" not in word or Path(word).exists()]
    if len(files) > 1:
        raise UserError(f"predict takes one file, not {files[0]} and {files[1]}; give one, or - and both on stdin")
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
