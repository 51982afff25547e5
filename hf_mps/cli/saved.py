"""`hf-mps predict`, `evaluate` and `chat`: a saved model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from hf_mps.cli.options import Batch, Debug, Json, Overrides, SavedModel, SavedTask, deferred
from hf_mps.core import status
from hf_mps.core.errors import UserError


@deferred
def predict(
    run: SavedModel,
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="[FILE | -] [KEY=VALUE]...",
            help="The rows: csv, jsonl, a text in each line, an image or sound; - is stdin. KEY=VALUE changes keys.",
        ),
    ] = None,
    out: Annotated[
        Path | None, Option(metavar="FILE", help="Write the answers to this new file. Default: stdout.")
    ] = None,
    kind: Annotated[str | None, Option("--format", help="csv or jsonl. Default: as --out ends, or csv.")] = None,
    probabilities: Annotated[
        bool, Option("--probabilities", help="Also write the probability of every class or label.")
    ] = False,
    keep: Annotated[
        list[str] | None, Option(metavar="COLUMN", help="Copy this column of the rows to the answers; may be repeated.")
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


@deferred
def evaluate(
    run: SavedModel,
    overrides: Overrides = None,
    batch: Batch = None,
    task: SavedTask = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure a saved model by the metrics of its run; nothing is trained or written.

    Without further words it measures the validation rows of the run, and so prints the run's metrics again.
    data.validation=other.csv measures your own rows with labels, data.test=more.csv a further split.

    Example: `hf-mps evaluate runs/quickstart`
    """
    wrong = [word for word in overrides or () if "=" not in word]
    if wrong:
        raise UserError(f"'{wrong[0]}' is not KEY=VALUE; next, to measure a file: data.validation={wrong[0]}")
    from hf_mps.tools.saved.run import open_run

    saved = open_run(run, task)
    with status.shown("loading PyTorch …"):
        from hf_mps.tools.saved.evaluate import evaluate as measure

        measured = measure(saved, overrides or (), batch=batch)
    if json:
        from json import dumps

        from hf_mps.core.files import plain

        content: dict[str, Any] = {
            "run": measured.run.where,
            "task": measured.run.task,
            "device": measured.device,
            "choices": measured.choices,
            "main_metric": measured.main,
            "splits": {
                split: {"rows": measured.rows[split], "of": measured.where[split], "metrics": metrics}
                for split, metrics in measured.metrics.items()
            },
        }
        print(dumps(plain(content), indent=2, ensure_ascii=False))
        return
    from hf_mps.core.text import aligned, counted

    for split, metrics in measured.metrics.items():
        before = measured.of_the_run(split)
        heads = ("metric", split, *(("its run",) if before else ()))
        lines = [
            (name, f"{metrics[name]:.4f}", *((f"{before[name]:.4f}" if name in before else "",) if before else ()))
            for name in sorted(metrics, key=lambda name: (name != measured.main, name == "loss"))
        ]
        for line in aligned([heads, *lines], right=(1, 2)):
            print(line)
        print(f"rows  {counted(measured.rows[split], 'row')}, {measured.where[split]}")


@deferred
def chat(
    run: SavedModel,
    system: Annotated[str | None, Option(metavar="TEXT", help="The system prompt.")] = None,
    base: Annotated[bool, Option("--base", help="Also let the model answer as it was before its training.")] = False,
    max_new_tokens: Annotated[int, Option(min=1, help="The longest answer, in tokens.")] = 512,
    temperature: Annotated[
        float, Option(min=0.0, help="Above 0 answers are drawn; 0 takes the likeliest words.")
    ] = 0.0,
    seed: Annotated[int, Option(min=0, help="The seed of drawn answers.")] = 42,
    task: SavedTask = None,
    debug: Debug = False,
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
