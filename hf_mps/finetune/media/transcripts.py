"""What both ways of recognising speech share: columns, which rows are heard, and the rows of predictions.csv."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe import schema
from hf_mps.metrics.texts import cer, wer

SNIPPET = """from transformers import pipeline
recognise = pipeline("automatic-speech-recognition", model=".")
# recognise(array)['text'], of 16,000 samples a second in a numpy array"""

Left = dict[str, dict[str, int]]
"""How many rows of each split are left out, by the reason."""


class Columns(schema.Columns):
    """The columns of the data by their roles: `audio` holds a path, relative to its file, or the bytes of a file."""

    audio: str = "audio"
    text: str = "text"


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


def short_enough(rows: Rows, counts: Sequence[int], most: float, rate: int) -> list[int]:
    """Return the numbers of the rows of at most `most` seconds; `counts` are their samples, `rate` of them a second.

    Raises UserError where none is.
    """
    kept = [row for row, count in enumerate(counts) if count <= most * rate]
    if not kept:
        shortest = min(counts) / rate
        raise UserError(
            f"{rows.where}: every row is longer than max_duration_in_seconds, {most:g}; the shortest has {shortest:.1f}"
        )
    return kept


def left_out(counts: Left) -> dict[str, Choice[str]]:
    """Return the choice that says which rows take no part, and why; empty where all do."""
    parts = [(f"{count} {split} rows", why) for split, reasons in counts.items() for why, count in reasons.items()]
    told = [(what, why) for what, why in parts if not what.startswith("0 ")]
    if not told:
        return {}
    return {"left_out": Choice(", ".join(what for what, _ in told), ", ".join(dict.fromkeys(why for _, why in told)))}


def lines(
    rows: Rows,
    seconds: Sequence[float],
    texts: Sequence[str],
    truths: Sequence[str] = (),
    *,
    kept: Sequence[int] | None = None,
    clean: Callable[[str], str] = str,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of predictions.csv: each answer beside its truth, with the error rates of both after `clean`.

    `kept` are the numbers of the rows that the other sequences are of, by default all. A row whose truth is nothing
    after `clean` has no rates; without `truths` none has.
    """
    numbers = range(len(texts)) if kept is None else kept
    for place, (number, length, text) in enumerate(zip(numbers, seconds, texts, strict=True)):
        line: dict[str, Any] = {"row": rows.number(number), "seconds": round(length, 2), "prediction": text}
        if truths:
            line["truth"] = truths[place]
            said, right = clean(text), clean(truths[place])
            line |= {"wer": round(wer([said], [right]), 4), "cer": round(cer([said], [right]), 4)} if right else {}
        yield line
