"""Sources of rows: a hub data set, local files, a folder of images or sound, or this project's own pairs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.errors import UserError, nearest
from hf_mps.core.text import first_line
from hf_mps.finetune.data import cache, formats, json_rows, tables
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models.checkpoint import unreachable
from hf_mps.finetune.recipe import catalogue, schema
from hf_mps.finetune.run.failures import describe
from hf_mps.finetune.run.logging import datasets_silent

if TYPE_CHECKING:
    from datasets import Dataset

# Folders where a split of a `data.folder` may be, unless `data.splits` says.
FOLDERS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev", "eval", "test")}
# Metadata files of a folder, as in the hub's image and audio folders, and their column with the file's name.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FILE_NAME = "file_name"
# Formats in which every value is text, numbers too; and formats of plain rows.
TEXTUAL = ("csv", "tsv", "xlsx")
PLAIN = ("csv", "tsv", "json", "jsonl", "parquet", "xlsx", "text")
# A path below the recipes' folder; and the rows of a recipe without `data.rows`.
PAIRS = Path("data", "paraphrases.tsv")
GENERATED = {"train": 2000, "validation": 500}


def read(data: schema.Data, split: str) -> Rows:
    """Return one split's rows as their source has them, images and sound undecoded. Raises UserError."""
    if data.source == "files":
        name = (data.files or {})[split]
        rows = _local(data, Path(name).expanduser(), name)
    else:
        rows = {"hub": _hub, "folder": _folder, "generated": _generated}[data.source](data, split)
    return rows.with_columns(undecoded(rows.dataset))


def split_folder(data: schema.Data, split: str) -> Path:
    """Return the folder of one split inside `data.folder`. Raises UserError where there is none, naming the others."""
    root = Path(data.folder or "").expanduser()
    if data.splits:
        names: tuple[str, ...] = (data.splits[split],)
    else:
        # Only classes inside: the whole folder is the training split, and a share of it is held out.
        names = FOLDERS[split] + ((".",) if split == "train" and data.hold_out else ())
    for name in names:
        if (root / name).is_dir():
            return root / name
    inside = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name[0] != ".")
    way_on = "" if data.splits else "; or data.hold_out=0.1 to keep a tenth of the training rows for validation"
    told = f"data.folder: {data.folder} holds no folder {' or '.join(names)} for the {split} split"
    raise UserError(f"{told}; there are: {', '.join(inside) or 'none'}{nearest(names[0], inside)}{way_on}")


@dataclass(frozen=True)
class Reading:
    """How a file is read: its format, `make`, which goes through its rows, all that this depends on, and notes."""

    kind: str
    options: tuple[Any, ...]
    make: Callable[[], cache.Tables]
    notes: tuple[str, ...] = ()


def _local(data: schema.Data, path: Path, name: str, further: Collection[str] = ()) -> Rows:
    """Return the rows of the file `path`, called `name` to a person, with `further` columns beside the task's."""
    kind = formats.kind(path)
    found = reading(data, path, name, data.TEXT if kind == "text" else str(kind), further)
    dataset = cache.cached(path, found.options, found.make)
    return Rows(dataset, name, textual=found.kind in TEXTUAL, folder=path.parent, notes=found.notes)


def reading(data: schema.Data, path: Path, name: str, kind: str, further: Collection[str] = ()) -> Reading:
    """Return how a file of the format `kind` is read for the columns of `data`.

    Raises UserError for CoNLL's columns where the task has no words and tags.
    """
    roles = data.columns.roles()
    if kind in ("csv", "tsv"):
        make = partial(tables.separated, path, name, header=data.header)
        return Reading(kind, (kind, data.header), make, tables.separated_notes(path))
    if kind == "xlsx":
        make = partial(tables.sheet, path, name, header=data.header)
        return Reading(kind, (kind, data.header), make, tables.sheet_notes(path, name))
    if kind in ("json", "jsonl"):
        # `translation.en` needs the column `translation`.
        wanted = {".".join(column.split(".")[:end]) for column in (*roles.values(), *further) for end in range(1, 9)}
        make = partial(json_rows.tables, path, name, wanted, data.field)
        return Reading(kind, (kind, data.field, sorted(wanted)), make)
    if kind == "conll":
        if not {"words", "tags"} <= roles.keys():
            raise UserError(f"{name}: CoNLL files are for token-classification; allowed: {formats.allowed(PLAIN)}")
        defaults = type(data.columns)().roles()
        make = partial(tables.sentences, path, name, roles, defaults)
        return Reading(kind, (kind, roles, defaults), make, tables.sentence_notes(path, name, roles, defaults))
    return Reading(kind, (kind,), partial(tables.parquet if kind == "parquet" else tables.texts, path, name))


def _folder(data: schema.Data, split: str) -> Rows:
    """Return a folder's images or sound, with each file's class folder or the columns of the metadata file."""
    from datasets import Dataset

    place = split_folder(data, split)
    column, files = media(place)
    metadata = next((place / name for name in METADATA if (place / name).is_file()), None)
    if metadata is not None:
        # Read here: the builder of `datasets` would decode sound on the way, and needs torchcodec for it.
        described = _local(data, metadata, str(metadata), [FILE_NAME])
        there = described.dataset.column_names
        if FILE_NAME not in there:
            problem = f"there is no column {FILE_NAME}, which names the files; the columns are {', '.join(there)}"
            raise UserError(f"{metadata}: {problem}")
        return described.with_columns(described.dataset.rename_column(FILE_NAME, column))
    # Names and not numbers: each split would number its own classes.
    rows = [{column: str(file.resolve()), "label": file.parent.name} for file in files]
    return Rows(Dataset.from_list(rows), str(place), folder=place)


def media(folder: Path) -> tuple[str, list[Path]]:
    """Return whether a folder holds images or sound, whichever is more frequent, and its files of that kind in order.

    Raises UserError where it holds neither.
    """
    from datasets.packaged_modules.audiofolder.audiofolder import AudioFolder
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    kinds = {"image": set(ImageFolder.EXTENSIONS), "audio": set(AudioFolder.EXTENSIONS)}
    found = {kind: [file for file in files if file.suffix.lower() in known] for kind, known in kinds.items()}
    most = max(found, key=lambda kind: len(found[kind]))
    if not found[most]:
        raise UserError(f"{folder}: holds neither images nor sound; allowed: a folder for each class with files in it")
    return most, found[most]


def _hub(data: schema.Data, split: str) -> Rows:
    """Return one split of a hub data set, from the cache where it is there."""
    from datasets import load_dataset

    assert data.hub is not None
    there = (data.splits or {}).get(split, split)
    where = " ".join(filter(None, (data.hub, data.config, there)))
    try:
        with datasets_silent():
            dataset = load_dataset(data.hub, data.config, split=there, revision=data.revision)
    except Exception as error:  # the hub's clients raise anything from ConnectionError to plain ValueError
        # A full disk and the like is no fault of the data.
        if describe(error) is not None and not isinstance(error, FileNotFoundError):
            raise
        root: BaseException = error
        while root.__cause__ is not None:  # `datasets` wraps what pandas or pyarrow said
            root = root.__cause__
        instead = "give files with data.files.train=PATH data.files.validation=PATH"
        download = f"hf download {data.hub} --repo-type dataset"
        raise UserError(unreachable(f"data {where}", download, instead, first_line(root))) from error
    local = Path(data.hub)
    return Rows(dataset, where, folder=local if local.is_dir() else None)


def _generated(data: schema.Data, split: str) -> Rows:
    """Return the first paraphrase pairs of a split, as many as the recipe wants; they are beside the recipes."""
    import pyarrow
    import pyarrow.compute

    path = catalogue.folder() / PAIRS

    def pairs() -> cache.Tables:
        """Yield the rows of the split with integer labels; the table's own values are text."""
        for table in tables.separated(path, path.name):
            rows = table.filter(pyarrow.compute.equal(table["split"], split)).drop_columns("split")
            # The third of the columns that are left: two sentences come before it.
            yield rows.set_column(2, "label", rows["label"].cast(pyarrow.int64()))

    dataset = cache.cached(path, ["pairs", split], pairs)
    size = getattr(data.rows, split) or GENERATED[split]
    if size > len(dataset):
        raise UserError(f"data.rows.{split} is {size}; allowed: up to {len(dataset):,} of the generated pairs")
    return Rows(dataset.select(range(size)), f"generated pairs, {split}")


def undecoded(dataset: Dataset) -> Dataset:
    """Leave images and sound as {"bytes", "path"}: a task decodes them itself, once, with what it has."""
    from datasets import Audio, Image

    for column, kind in dataset.features.items():
        if isinstance(kind, (Image, Audio)):
            dataset = dataset.cast_column(column, type(kind)(decode=False))
        elif isinstance(getattr(kind, "feature", None), Image):
            dataset = dataset.cast_column(column, type(kind)(Image(decode=False)))
    return dataset
