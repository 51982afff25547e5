"""`hf-mps predict`, `evaluate` and `chat`: a saved model."""

from __future__ import annotations

from pathlib import Path

from typer import Argument, Option

from hf_mps.cli.options import Batch, Json, Overrides, SavedModel, SavedTask, deferred
from hf_mps.core import status
from hf_mps.core.errors import UserError


@deferred
def predict(
    run: SavedModel,
    words: list[str] | None = Argument(
        None,
        metavar="[FILE | -] [KEY=VALUE]...",
        help="The rows: csv, jsonl, a text in each line, an image or sound; - is stdin. KEY=VALUE changes keys.",
    ),
    out: Path | None = Option(None, metavar="FILE", help="Write the answers to this new file. Default: stdout."),
    kind: str | None = Option(None, "--format", help="csv or jsonl. Default: as --out ends, or csv."),
    probabilities: bool = Option(False, "--probabilities", help="Also write the probability of every class or label."),
    keep: list[str] | None = Option(
        None, metavar="COLUMN", help="Copy this column of the rows to the answers; may be repeated."
    ),
    batch: Batch = None,
    task: SavedTask = None,
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

        source, columns = files[0] if files else "-", tuple(dict.fromkeys(keep or ()))
        answer(saved, source, out, kind=kind, batch=batch, probabilities=probabilities, keep=columns)


@deferred
def evaluate(
    run: SavedModel, overrides: Overrides = None, batch: Batch = None, task: SavedTask = None, json: Json = False
) -> None:
    """Measure a saved model by the metrics of its run; nothing is trained or written.

    Without further words it measures the validation rows of the run, and so prints the run's metrics again.
    data.validation=other.csv measures your own rows with labels, data.test=more.csv a further split.

    Example: `hf-mps evaluate runs/quickstart`
    """
    if wrong := [word for word in overrides or () if "=" not in word]:
        raise UserError(f"'{wrong[0]}' is not KEY=VALUE; next, to measure a file: data.validation={wrong[0]}")
    from hf_mps.tools.saved.run import open_run

    saved = open_run(run, task)
    with status.shown("loading PyTorch …"):
        from hf_mps.tools.saved.evaluate import evaluate as measure

        measured = measure(saved, overrides or (), batch=batch)
    measured.print_json() if json else measured.print()


@deferred
def chat(
    run: SavedModel,
    system: str | None = Option(None, metavar="TEXT", help="The system prompt."),
    base: bool = Option(False, "--base", help="Also let the model answer as it was before its training."),
    max_new_tokens: int = Option(512, min=1, help="The longest answer, in tokens."),
    temperature: float = Option(0.0, min=0.0, help="Above 0 answers are drawn; 0 takes the likeliest words."),
    seed: int = Option(42, min=0, help="The seed of drawn answers."),
    task: SavedTask = None,
) -> None:
    """Talk with a saved instruction model, in the chat template of its training.

    The model remembers the conversation: /reset forgets it, /system TEXT changes the system prompt, /exit ends. Each
    line of a pipe is a turn, and stdout gets only the answers.

    Example: `hf-mps chat runs/sft/alpaca`
    """
    from hf_mps.tools.saved.run import open_run

    saved = open_run(run, task)
    with status.shown("loading PyTorch …"):
        from hf_mps.tools.saved.chat import Manner
        from hf_mps.tools.saved.chat import chat as talk

        talk(saved, Manner(max_new_tokens, temperature, seed), system=system, base=base)
