"""Small corpora on disk, and the stages of a stream over them, for the tests of this folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from hf_mps.finetune.stream import files
from hf_mps.finetune.stream.batches import Arranging, Batches, Making
from hf_mps.finetune.stream.endless import Corpus, Reader, Reading, Windows


def write(folder: Path, name: str, numbers: Sequence[int], kind: str = "jsonl") -> Path:
    """A file of rows `row N` in a format that streams."""
    return write_rows(folder / f"{name}.{kind}", [{"text": f"row {number}", "n": number} for number in numbers])


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """A file of rows in the format of its name; those of Parquet in groups of seven."""
    kind = path.suffix[1:]
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    elif kind in ("csv", "tsv"):
        separator = "," if kind == "csv" else "\t"
        lines = [separator.join(rows[0]), *(separator.join(map(str, row.values())) for row in rows)]
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    elif kind == "txt":
        path.write_text("".join(f"{row['text']}\n" for row in rows), encoding="utf-8")
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def reading(*patterns: Path | str, weights: Sequence[float] = (), **settings: Any) -> Reading:
    """The reading of the texts in these files, a source each."""
    corpora = [
        Corpus(files.of_pattern(str(pattern), "data"), weights[place] if weights else 1.0, str(pattern))
        for place, pattern in enumerate(patterns)
    ]
    said = {"columns": {"text": "text"}, "texts": ("text",), "seed": 3} | settings
    return Reading(tuple(corpora), **said)


def numbers(rows: Any, count: int) -> list[int]:
    """The numbers of the next `count` rows `row N`."""
    return [int(row["text"].split()[1]) for row in islice(rows, count)]


def encode(rows: Sequence[Any]) -> list[Any]:
    """A row `row N` becomes N % 7 + 1 tokens N."""
    made = []
    for row in rows:
        number = int(row["text"].split()[1])
        made.append([{"input_ids": [number] * (number % 7 + 1)}])
    return made


def batches(read: Reading, making: Making, arranging: Arranging, state: Any = None, *, buffer: int = 10) -> Batches:
    """The batches of the only reader."""
    return Batches(Windows(Reader(read, 0, 1), buffer, read.seed, state), making, arranging, state)
