"""What both tasks of recognising speech share: columns, which rows are heard, and the rows of predictions.csv."""

from __future__ import annotations

import math
import struct
import wave
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.media import audio
from hf_mps.finetune.recipe import schema
from hf_mps.finetune.tasks._base import GENERATES, Task
from hf_mps.finetune.text import tokens
from hf_mps.metrics.texts import cer, wer

# Words spelled in tones, a tone for a letter: sound that a tiny model can learn to write down, for smoke runs.
SPELLED = ("abba", "baa", "cab", "dad", "add", "bad", "cad", "dab")
RATE, LETTER = 8000, 800
"""Samples a second, and of a letter."""

Case = Literal["lower", "upper", "keep"]
Left = dict[str, dict[str, int]]
"""How many rows of each split are left out, by the reason."""
Ids = Callable[[Sequence[str], Sequence[int]], list[list[int]]]
"""Makes ids of texts; the second argument has their rows' numbers."""


class Columns(schema.Columns):
    """The columns of the data by their roles: `audio` holds a path, relative to its file, or the bytes of a file."""

    audio: str = "audio"
    """The column of the sound: a path, or bytes."""
    text: str = "text"
    """The column of the text."""


class Data(schema.Data):
    """Adds the columns."""

    columns: Columns = Columns()


class SpeechTask(Task):
    """A task that writes down what is said."""

    pipeline_tag = "automatic-speech-recognition"
    metrics = ("wer", "cer")
    truth = ("text",)
    unsharded = GENERATES
    shows = "texts"
    extractor: Any

    def inputs(self, rows: Rows) -> audio.Sounds:
        every = range(len(rows.dataset))
        counts = [audio.samples(rows, at, self.extractor.sampling_rate) for at in every]
        return audio.Sounds(rows, None, every, counts, self.extractor)

    @classmethod
    def smoke_rows(cls, recipe: Any, folder: Path) -> dict[str, list[dict[str, Any]]]:
        """Write 24 wav files of two words each into `folder`; return their rows: 16 to train on, 8 others."""
        made, named = [], recipe.data.columns
        for number in range(24):
            said = f"{SPELLED[number % 8]} {SPELLED[number // 8]}"
            path = folder / f"{number}.wav"
            with wave.open(str(path), "wb") as file:
                file.setparams((1, 2, RATE, 0, "NONE", ""))  # one channel of two bytes a sample
                for letter in said:
                    pitch = 0 if letter == " " else 300 + 200 * (ord(letter) - ord("a"))  # a space is silence
                    tone = (int(9000 * math.sin(2 * math.pi * pitch * time / RATE)) for time in range(LETTER))
                    file.writeframes(b"".join(struct.pack("<h", sample) for sample in tone))
            made.append({named.audio: path.name, named.text: said})
        return {"train": made[:16], "validation": made[16:]}


def cleaned(text: str, case: Case, ignored: str) -> str:
    """Return `text` in `case`, without the `ignored` characters and surplus white space."""
    kept = " ".join(text.translate(dict.fromkeys(map(ord, ignored))).split())
    return {"lower": kept.lower(), "upper": kept.upper(), "keep": kept}[case]


def encoded(rows: Rows, tokenizer: Any, key: Sequence[Any], ids: Ids, rate: int) -> Any:
    """Return `labels`, what `ids` makes of texts and their rows' numbers, and `samples` (at `rate`) of each row.

    `key` is that of `tokens.map_cached`.
    """

    def encode(batch: Mapping[str, list[Any]], indices: Sequence[int]) -> dict[str, Any]:
        found = ids(tokens.texts(rows, "text", batch, indices), indices)
        return {"labels": found, "samples": [audio.samples(rows, index, rate) for index in indices]}

    features = {"labels": ("int32",), "samples": "int64"}
    return tokens.map_cached(rows, encode, content=tokens.digest(tokenizer), key=key, features=features)


def short_enough(rows: Rows, counts: Sequence[int], most: float, rate: int) -> list[int]:
    """Return the numbers of the rows of at most `most` seconds; `counts` are their samples, `rate` of them a second.

    Raises UserError where none is.
    """
    kept = [row for row, count in enumerate(counts) if count <= most * rate]
    if not kept:
        allowed = f"allowed: {min(counts) / rate:.1f} or more"
        raise UserError(f"{rows.where}: each row is longer than max_duration_in_seconds, {most:g}; {allowed}")
    return kept


def left_out(counts: Left) -> dict[str, Choice[str]]:
    """Return the choice that says which rows take no part, and why; empty where all do."""
    parts = ((split, why, count) for split, reasons in counts.items() for why, count in reasons.items())
    told = [(f"{count} {split} rows", why) for split, why, count in parts if count]
    if not told:
        return {}
    return {"left_out": Choice(", ".join(what for what, _ in told), ", ".join(dict.fromkeys(why for _, why in told)))}


def lines(
    sounds: audio.Sounds, texts: Sequence[str], truths: Sequence[str] = (), clean: Callable[[str], str] = str
) -> Iterator[dict[str, Any]]:
    """Yield the rows of predictions.csv: each answer beside its truth, with the error rates of both after `clean`.

    A row whose truth is nothing after `clean` has no rates; without `truths` none has.
    """
    for place, (number, length, text) in enumerate(zip(sounds.kept, sounds.seconds, texts, strict=True)):
        line: dict[str, Any] = {"row": sounds.rows.number(number), "seconds": round(length, 2), "prediction": text}
        if truths:
            line["truth"] = truths[place]
            said, right = clean(text), clean(truths[place])
            line |= {"wer": round(wer([said], [right]), 4), "cer": round(cer([said], [right]), 4)} if right else {}
        yield line
