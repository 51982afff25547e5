"""Pieces of files that can be read alone, and which reader reads which of them in which pass."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hf_mps.finetune.stream.files import File

SPAN = 64 * 2**20
"""Bytes of a piece of a file of lines."""
MANY = 64
"""Files from which on each is one piece: footers of Parquet need not be read before the run begins."""
WHOLE = -1


@dataclass(frozen=True)
class FileSlice:
    """A piece of the file numbered `file`: bytes of lines that begin from `start` up to `end`, or row groups of
    Parquet; `end` is WHOLE where nobody has looked yet.
    """

    file: int
    start: int
    end: int


@dataclass(frozen=True)
class Assignment:
    """What one reader has of a pass: units in the order in which it reads them, and of each the rows whose number in it
    leaves `remainder` when divided by `readers` (1 where nobody else reads them).
    """

    units: tuple[int, ...]
    readers: int
    remainder: int


def cut(files: Sequence[File]) -> tuple[FileSlice, ...]:
    """Return the pieces of `files` in their order: row groups, spans of plain lines, whole files of anything else.

    A line of csv may be a part of a quoted text and one of gzip cannot be reached alone, so these stay whole.
    """
    units = []
    for number, file in enumerate(files):
        if len(files) >= MANY or file.packed or file.kind in ("csv", "tsv"):
            units.append(FileSlice(number, 0, WHOLE))
        elif file.kind == "parquet":
            units += [FileSlice(number, group, group + 1) for group in range(_row_groups(file))]
        else:
            spans = max(1, round(file.size / SPAN))
            edges = [file.size * place // spans for place in range(spans + 1)]
            units += [FileSlice(number, *edge) for edge in pairwise(edges)]
    return tuple(units)


def share(count: int, lane: int, lanes: int, order: str) -> Assignment:
    """Return what reader `lane` of `lanes` has of `count` units in a pass that the text `order` shuffles.

    All of them together have each row of each unit once. Where there are fewer units than readers, several read one and
    keep every second, third, … row of it.
    """
    places = list(range(count))
    random.Random(order).shuffle(places)
    if count >= lanes:
        return Assignment(tuple(places[lane::lanes]), 1, 0)
    mine = lane % count
    return Assignment((places[mine],), len(range(mine, lanes, count)), lane // count)


def _row_groups(file: File) -> int:
    import pyarrow.parquet

    with file.opened() as opened:
        return max(1, int(pyarrow.parquet.ParquetFile(opened).num_row_groups))
