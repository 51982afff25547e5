"""The rows of one split, and where a person finds each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, brief

if TYPE_CHECKING:
    from datasets import Dataset

    from hf_mps.finetune.stream.streamed import Stream


@dataclass(frozen=True)
class Rows:
    """The rows of one split, its columns renamed to their roles ("text", "label", …).

    `where` names the split to a person; `textual` says that every value is text, as in a csv, numbers too.
    Paths of images and sound are relative to `folder`, that of the rows' file. `notes` say what a person may want to
    know of how the rows were read. Where the rows are streamed, `stream` reads them all and `dataset` holds the first.
    """

    dataset: Dataset
    where: str
    textual: bool = False
    numbers: tuple[int, ...] | None = None
    folder: Path | None = None
    notes: tuple[str, ...] = ()
    stream: Stream | None = None

    @property
    def origin(self) -> str:
        """The origin of the rows, with the notes."""
        return f"{self.where} ({'; '.join(self.notes)})" if self.notes else self.where

    def number(self, index: int) -> int:
        """Return a row's place in its source, from 1 after any header, whatever sample was drawn."""
        return (self.numbers[index] if self.numbers is not None else index) + 1

    def place(self, index: int) -> str:
        """Return where a person finds a row: `train.csv: row 3`."""
        return f"{self.where}: row {self.number(index)}"

    def sample(self, indices: list[int], where: str | None = None) -> Rows:
        """Return only the rows at `indices`, in that order."""
        numbers = tuple(self.number(index) - 1 for index in indices)
        return replace(self, dataset=self.dataset.select(indices), where=where or self.where, numbers=numbers)

    def with_columns(self, dataset: Dataset) -> Rows:
        """Return the same rows in the same order with other columns."""
        return replace(self, dataset=dataset)

    def path(self, value: str) -> Path:
        """Return the file that a row names; it is relative to the folder of the rows' own file, never to the user's."""
        path = Path(value).expanduser()
        return path if path.is_absolute() or self.folder is None else self.folder / path

    def content_of(self, value: Any, index: int, role: str) -> bytes:
        """Return the encoded image or sound that `value` is, of column `role` in row `index` or in its list.

        It is a path, or {"bytes", "path"} as in Parquet. Raises UserError, naming the row, for a gap and for a file
        that is missing or cannot be read.
        """
        where = self.place(index)
        name = value.get("path") if isinstance(value, dict) else value
        if isinstance(value, dict) and value.get("bytes") is not None:
            return bytes(value["bytes"])
        if not name:
            raise UserError(f"{where} has no {role}; allowed: one in every row")
        if not isinstance(name, str):
            raise UserError(f"{where}: {role} is a {type(name).__name__}; allowed: a path, or bytes as in Parquet")
        try:
            return self.path(name).read_bytes()
        except FileNotFoundError as error:
            raise UserError(f"{where}: {role}: {self.path(name)}: there is no such file") from error
        except (OSError, ValueError, RuntimeError) as error:  # a path with a NUL; the home of ~nobody
            why = getattr(error, "strerror", None) or error
            raise UserError(f"{where}: {role}: {brief(name)}: cannot be read: {why}; allowed: a file's path") from error
