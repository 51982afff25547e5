"""Answers that are pictures, such as masks: a file for each row, in a folder beside the answers."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError

# Digits of a row's number in a file's name, so that a folder lists its rows in their order.
DIGITS = 6


@dataclass
class Folder:
    """Where pictures go: to `place` once one comes, and at the end to `whole`; nowhere without them."""

    place: Path | None = None
    whole: Path | None = None

    def kept(self, answers: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield answers with the path of each picture, from where the answers are, in its place, or without it.

        Raises UserError where the folder is there before.
        """
        from hf_mps.finetune.tasks._answering import Picture

        for answer in answers:
            found = {}
            for name, value in answer.items():
                if not isinstance(value, Picture):
                    found[name] = value
                elif self.place is not None and self.whole is not None:
                    file = f"{int(answer['row']):0{DIGITS}}.png"
                    self._write(self.place, self.whole, file, value.png)
                    found[name] = f"{self.whole.name}/{file}"
            yield found

    @staticmethod
    def _write(place: Path, whole: Path, file: str, content: bytes) -> None:
        if not place.is_dir():
            if whole.exists():
                raise UserError(f"--out: the pictures' folder {whole} is there already; next: another name")
            place.mkdir()
        (place / file).write_bytes(content)


@contextmanager
def beside(out: Path | None) -> Iterator[Folder]:
    """Give the folder of the pictures of the answers in `out`: masks.csv has those in masks.files.

    It is there, whole, once the context ended well, where any came.
    """
    if out is None:
        yield Folder()
        return
    whole = out.with_name(f"{out.stem}.files")
    place = hidden(whole)
    try:
        yield Folder(place, whole)
        if place.is_dir():
            place.rename(whole)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def hidden(path: Path) -> Path:
    """Return a name beside `path` that nothing has, for what is being written."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
