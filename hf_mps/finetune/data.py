"""The rows of a recipe: from the hub, from local files or generated, with the columns that the task reads.

Everything is read through `datasets`, so that rows and whatever is made of them are cached below the user's HF_HOME.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.errors import UserError, nearest
from hf_mps.finetune import recipe as recipes
from hf_mps.finetune.quiet import datasets_silent

if TYPE_CHECKING:
    from datasets import Dataset

BUILDERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
SPLITS: tuple[recipes.Split, ...] = ("train", "validation")
NO_ROWS = "holds no rows; allowed: at least one"
# What `pairs` makes where a recipe gives no `data.rows`.
GENERATED = {"train": 2000, "validation": 500}


@dataclass(frozen=True)
class Rows:
    """The rows of one split, its columns renamed to their roles ("text", "label", …).

    `where` names the split to a person; `textual` says that every value is text, as in a csv, whatever it stands for.
    """

    dataset: Dataset
    where: str
    textual: bool = False
    numbers: tuple[int, ...] | None = None

    def number(self, index: int) -> int:
        """The place of a row in its source, counted from 1 after any header, whatever sample was drawn from it."""
        return (self.numbers[index] if self.numbers is not None else index) + 1

    def sample(self, indices: list[int], where: str | None = None) -> Rows:
        """Only the rows at `indices`, in that order."""
        numbers = tuple(self.numbers[index] if self.numbers is not None else index for index in indices)
        return Rows(self.dataset.select(indices), where or self.where, self.textual, numbers)


def check(data: recipes.Data) -> None:
    """Refuse files that are not there or of an unknown kind, before anything heavy is imported. Raises UserError."""
    for split, name in (data.files or {}).items():
        path = Path(name).expanduser()
        if path.suffix not in BUILDERS:
            raise UserError(f"data.files.{split}: {name}: cannot tell the format; allowed: {', '.join(BUILDERS)}")
        if not path.is_file():
            raise UserError(f"data.files.{split}: {name}: there is no such file{_neighbour(path)}")
        if path.stat().st_size == 0:
            raise UserError(f"data.files.{split}: {name}: the file is empty; allowed: at least one row")


def load(data: recipes.Data, columns: Mapping[str, str], seed: int) -> dict[str, Rows]:
    """Return the rows of `train` and `validation`, with `columns` ({role: column}) renamed to their roles.

    Raises UserError for what cannot be read, a column that is not there (naming those that are), a split without rows.
    """
    sources = {"hub": _hub, "files": _file, "generated": _generated}
    read = sources[data.source]
    wanted: list[recipes.Split] = ["train"] if data.hold_out else list(SPLITS)
    found: dict[recipes.Split, Rows] = {split: _narrow(read(data, split, seed), columns) for split in wanted}
    if data.hold_out:
        found |= _held_out(found["train"], data.hold_out, seed)
    for split, rows in found.items():
        limit = getattr(data.rows, split)
        if limit and limit < len(rows.dataset):
            found[split] = rows.sample(_shuffled(len(rows.dataset), seed)[:limit])
    return {split: found[split] for split in SPLITS}


def _file(data: recipes.Data, split: recipes.Split, seed: int) -> Rows:
    """One local file through the builder of its kind."""
    from datasets import Features, Value, load_dataset
    from datasets.exceptions import DatasetGenerationError

    assert data.files is not None
    name = data.files[split]
    path = Path(name).expanduser()
    builder = BUILDERS[path.suffix]
    settings: dict[str, Any] = {}
    if builder == "csv":
        # Text throughout: pandas would guess a type for every 10,000 rows anew, and take the word "null" for a gap.
        header = _header(path, name)
        settings = {
            "features": Features({column: Value("string") for column in header}),
            "keep_default_na": False,
            "na_filter": False,
            "sep": "\t" if path.suffix == ".tsv" else ",",
            # A tab-separated file has no quoting (IANA text/tab-separated-values): GLUE's hold lone quotation marks.
            "quoting": csv.QUOTE_NONE if path.suffix == ".tsv" else csv.QUOTE_MINIMAL,
        }
    try:
        with datasets_silent():
            dataset = load_dataset(builder, data_files={split: str(path.resolve())}, split=split, **settings)
    except (DatasetGenerationError, ValueError, TypeError, KeyError) as error:
        _raise_machine_failure(error)
        if "corresponds to no data" in str(error):  # how `datasets` says that a split came out empty
            raise UserError(f"{name}: {NO_ROWS}") from error
        raise UserError(f"{name}: cannot be read as {path.suffix[1:]}: {_innermost(error)}") from error
    return Rows(dataset, name, textual=builder == "csv")


def _hub(data: recipes.Data, split: recipes.Split, seed: int) -> Rows:
    """One split of a hub data set, from the cache where it is there."""
    from datasets import load_dataset

    from hf_mps.finetune.checkpoint import unreachable

    assert data.hub is not None
    there = (data.splits or {}).get(split, split)
    where = " ".join(filter(None, (data.hub, data.config, there)))
    try:
        with datasets_silent():
            return Rows(load_dataset(data.hub, data.config, split=there, revision=data.revision), where)
    except Exception as error:  # the hub's clients raise anything from ConnectionError to plain ValueError
        _raise_machine_failure(error)
        instead = "give files with data.files.train=PATH data.files.validation=PATH"
        download = f"hf download {data.hub} --repo-type dataset"
        raise UserError(unreachable(f"data {where}", download, instead, _innermost(error))) from error


def _generated(data: recipes.Data, split: recipes.Split, seed: int) -> Rows:
    """The project's own paraphrase pairs, kept in the cache under their sizes, seed and the generator's source."""
    from datasets import Dataset, NamedSplit

    sizes = {name: getattr(data.rows, name) or GENERATED[name] for name in SPLITS}
    dataset = Dataset.from_generator(
        _pairs,
        gen_kwargs={
            "split": split,
            "train": sizes["train"],
            "validation": sizes["validation"],
            "seed": seed,
            "source": _pairs_source(),
        },
        split=NamedSplit(split),
    )
    return Rows(dataset, f"generated pairs, {split}")


def _pairs(split: str, train: int, validation: int, seed: int, source: str) -> Iterator[dict[str, Any]]:
    """The rows of one split; `source` is unused here, it makes `datasets` forget the rows of another generator."""
    from hf_mps.finetune import pairs

    yield from pairs.generate(rows_train=train, rows_dev=validation, seed=seed)[split]


def _pairs_source() -> str:
    """A digest of the generator's files."""
    import hashlib

    from hf_mps.finetune import pairs

    digest = hashlib.sha256()
    for path in sorted(
        Path(place) for folder in pairs.__path__ for place in Path(folder).rglob("*") if place.is_file()
    ):
        if path.suffix != ".pyc":
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _narrow(rows: Rows, columns: Mapping[str, str]) -> Rows:
    """Keep the columns of the task under the names of their roles; refuse a missing column and a split without rows."""
    there = rows.dataset.column_names
    for role, column in columns.items():
        if column not in there:
            raise UserError(
                f"{rows.where}: there is no column '{column}' for data.columns.{role}; the columns are"
                f" {', '.join(there)}{nearest(column, there)}"
            )
    if len(rows.dataset) == 0:
        raise UserError(f"{rows.where}: {NO_ROWS}")
    dataset = rows.dataset.select_columns(list(dict.fromkeys(columns.values())))
    return Rows(
        dataset.rename_columns({column: role for role, column in columns.items() if role != column}),
        rows.where,
        rows.textual,
    )


def _held_out(rows: Rows, share: float, seed: int) -> dict[recipes.Split, Rows]:
    """Split the training rows in two, seeded. Raises UserError where one side would be empty."""
    count = len(rows.dataset)
    kept_back = round(count * share)
    if not 0 < kept_back < count:
        raise UserError(f"{rows.where}: data.hold_out={share} of {count} rows leaves one split without rows")
    order = _shuffled(count, seed)
    validation = rows.sample(sorted(order[:kept_back]), f"{rows.where} (held out)")
    return {"train": rows.sample(sorted(order[kept_back:])), "validation": validation}


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def _header(path: Path, name: str) -> list[str]:
    """The column names of a csv or tsv. Raises UserError for no names, a name twice, or text that is not UTF-8."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            tabs = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            header = next(tabs if path.suffix == ".tsv" else csv.reader(file), [])
    except UnicodeDecodeError as error:
        raise UserError(
            f"{name}: is not UTF-8 text (byte {error.start}); next: iconv -f latin1 -t utf-8 {name} > new.csv"
        ) from error
    except csv.Error as error:
        raise UserError(f"{name}: cannot be read as {path.suffix[1:]}: {error}") from error
    twice = [column for column in header if header.count(column) > 1]
    if twice or not header:
        raise UserError(
            f"{name}: its first line " + (f"names the column '{twice[0]}' twice" if twice else "names no columns")
        )
    return header


def _neighbour(path: Path) -> str:
    """The nearest file in the same folder, or a word about the folder."""
    if not path.parent.is_dir():
        return f"; the folder {path.parent} is not there either"
    return nearest(path.name, [other.name for other in path.parent.iterdir()])


def _innermost(error: BaseException) -> str:
    """The first line of the error that began a chain: `datasets` wraps what pandas or pyarrow said."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def _raise_machine_failure(error: Exception) -> None:
    """Let a full disk and the like through: no fault of the data."""
    from hf_mps.finetune.failures import in_words

    if in_words(error) is not None and not isinstance(error, FileNotFoundError):
        raise error
