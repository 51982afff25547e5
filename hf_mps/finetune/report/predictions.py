"""predictions.csv: the kept model's answers to the validation rows, and a task's pictures of them.

A classifier's logits become each row's class or labels, with their probabilities.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_mps.core.choice import Choice
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


Row = dict[str, Any]
# The least probability of a label, of rows that may have several.
THRESHOLD = 0.5


def logits_of(predictions: Any) -> Any:
    """Return the logits alone; some models return hidden states behind them."""
    return predictions[0] if isinstance(predictions, tuple) else predictions


def keep_logits(logits: Any, _labels: Any) -> Any:
    """Trainer's `preprocess_logits_for_metrics`: drops hidden states behind the logits, which would fill memory."""
    return logits_of(logits)


def probabilities(logits: Any) -> Any:
    """Return the softmax over the last dimension in float64, of logits of any shape."""
    import numpy
    from scipy.special import softmax

    return softmax(numpy.asarray(logits, dtype=numpy.float64), axis=-1)


def sigmoids(logits: Any) -> Any:
    """Return the sigmoid in float64, of logits of any shape."""
    from scipy.special import expit

    return expit(logits.astype("float64"))


def rows(
    each: Sequence[Row], truths: Any, logits: Any, names: Sequence[str], least: float | None = None, every: bool = False
) -> list[Row]:
    """Return the rows of predictions.csv: each row's inputs, its true class, the predicted one and its probability.

    `logits` has shape (rows, classes), `truths` holds class ids, None for rows without. With `least` a row may have
    several labels: `truths` are 0 and 1 of the shape of `logits`, and a row's predictions are the labels of a
    probability of `least` or more, by falling probability. With `every` the probabilities of all classes come by their
    names.
    """
    lines, table = [], probabilities(logits) if least is None else sigmoids(logits)
    for place, (given, shares) in enumerate(zip(each, table, strict=True)):
        line = dict(given)
        if truths is not None and least is None:
            line["label"] = names[truths[place]]
        elif truths is not None:
            line["label"] = [name for name, flag in zip(names, truths[place], strict=True) if flag]
        if least is None:
            best = int(shares.argmax())
            line |= {"prediction": names[best], "probability": round(float(shares[best]), 4)}
        else:
            chosen = [number for number in (-shares).argsort(kind="stable") if shares[number] >= least]
            line["prediction"] = [names[number] for number in chosen]
            line["probability"] = [round(float(shares[number]), 4) for number in chosen]
        lines.append(line | (by_name(shares, names) if every else {}))
    return lines


def by_name(shares: Any, names: Sequence[str]) -> Row:
    """Return the probabilities of all classes, shape (classes,), by their names."""
    return {"probabilities": {name: round(float(share), 4) for name, share in zip(names, shares, strict=True)}}


def threshold(asked: float | None, chosen: Mapping[str, Any] | None = None) -> Choice[float]:
    """Return the probability from which on a label is answered; `chosen` holds what the run of a saved model chose."""
    if asked is not None:
        return Choice(asked, "threshold in the recipe")
    if isinstance(said := (chosen or {}).get("threshold"), float):
        return Choice(said, "that of its run")
    return Choice(THRESHOLD, "a label is answered that is likelier than not; threshold=NUMBER moves it")
