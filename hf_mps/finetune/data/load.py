"""The rows of a recipe, from a hub data set, local files, a folder of images or sound, or this project's own pairs.

The columns that the task reads get the names of their roles. Everything is read through `datasets`, so that rows and
what is made of them are cached below the user's HF_HOME.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core import notices
from hf_mps.core.errors import UserError, brief, nearest, neighbour
from hf_mps.core.text import counted, first_line
from hf_mps.finetune.data import formats, json_rows, tables
from hf_mps.finetune.data.rows import Rows, Tables, cached
from hf_mps.finetune.models.checkpoint import unreachable
from hf_mps.finetune.recipe import catalogue, schema
from hf_mps.finetune.run.failures import describe
from hf_mps.finetune.run.logging import datasets_silent

if TYPE_CHECKING:
    from datasets import Dataset


__all__ = ["SPLITS", "Rows", "check", "load"]

SPLITS = ("train", "validation")
# The formats that `data.field` and `data.header` have a meaning for; of TABLES every value is text, numbers too.
NESTED, TABLES = ("json", "jsonl"), ("csv", "tsv", "xlsx")
# Roles of texts that say nothing where they are empty; others may be (Alpaca's `input`).
READ = ("text", "text_pair", "negative", "source", "target", "context", "question", "instruction", "output")

SYSTEM = "system"
"""The role and the column of a system's words, which ShareGPT's rows have beside their conversation."""


def check(data: schema.Data) -> None:
    """Refuse missing files and unknown formats before anything heavy is imported. Raises UserError."""
    if data.streaming:
        from hf_mps.finetune.stream import streamed  # six modules that only a streamed run needs

        streamed.check(data)
        return
    every = [(split, *file) for split in data.files or {} for file in split_files(data, split)]
    for split, path, name in every:
        formats.refuse_missing(path, f"data.files.{split}: {name}")
        kind = formats.kind(path)
        if kind is None:
            allowed = f"{formats.allowed()}; those of text also packed, as .csv.gz"
            raise UserError(f"data.files.{split}: {name}: cannot tell the format; allowed: {allowed}")
        for told, said, kinds in (
            ("data.field is for JSON", data.field, NESTED),
            ("data.header is for tables", not data.header, TABLES),
        ):
            if said and kind not in kinds:
                raise UserError(f"data.files.{split}: {name}: {told}; allowed: {formats.allowed(kinds)}")
        formats.refuse_disguised(path, name)
    if data.folder:
        path = Path(data.folder).expanduser()
        if not path.is_dir():
            raise UserError(f"data.folder: {data.folder}: there is no such folder{neighbour(path)}")
        for split in splits_to_read(data):
            split_folder(data, split)


def splits_to_read(data: schema.Data) -> list[str]:
    """Return the splits to read from the source: `train`, `validation` unless it is held out, and any further one."""
    named = (data.files if data.files else data.splits) or {}
    held = ("validation",) if data.hold_out else ()
    return [split for split in dict.fromkeys((*SPLITS, *named)) if split not in held]


def load(data: schema.Data, seed: int, only: Collection[str] = ()) -> dict[str, Rows]:
    """Return the rows of `train`, `validation` and any further split, with its columns renamed to their roles.

    Of the splits `only` those named are returned, and no others read than these come from.

    Columns keep their types: lists and dicts of JSON, Parquet and the hub arrive as they are, and `translation.en`
    names a key of a column of dicts. A csv is text throughout. Images and sound are not decoded, see `Rows.content_of`.
    Raises UserError for what cannot be read, a column that is not there (naming those that are), a split without rows.
    """
    if data.streaming:
        from hf_mps.finetune.stream import streamed

        found = streamed.load(data, seed, READ, splits_to_read(data))
        return {split: found[split] for split in (*SPLITS, *(other for other in found if other not in SPLITS))}
    seed = seed if data.split_seed is None else data.split_seed
    columns = data.columns.roles()
    # Rows that are held out come of those that are trained on.
    wanted = {*only, *(("train",) if data.hold_out and "validation" in only else ())}
    needed = [split for split in splits_to_read(data) if not only or split in wanted]
    found = {split: _note_empty(narrow(read(data, split), columns, data)) for split in needed}
    if data.hold_out and "train" in found:
        found |= _held_out(found["train"], data.hold_out, seed, data.KEPT_TOGETHER)
    for split, rows in found.items():
        limit = data.rows.train if split == "train" else data.rows.validation
        if limit and limit < len(rows.dataset):
            found[split] = rows.sample(_shuffled(len(rows.dataset), seed)[:limit])
    ordered = (*SPLITS, *(other for other in found if other not in SPLITS))
    return {split: found[split] for split in ordered if split in found and (not only or split in only)}


def narrow(rows: Rows, columns: Mapping[str, str], data: schema.Data) -> Rows:
    """Keep the `columns` ({role: column}) under the names of their roles. Raises UserError for a missing one."""
    dataset = rows.dataset
    # Dicts become columns of their own (`translation.en`) as deep as the named columns need.
    if depth := max((name.count(".") for name in columns.values() if name not in dataset.column_names), default=0):
        dataset = dataset.flatten(max_depth=depth + 1)
    available = dataset.column_names
    for role, column in columns.items():
        if column not in available:
            told = f"{rows.where}: there is no column '{column}' for data.columns.{role}; the columns are"
            # Without a header the only value of the first row tells of another separator, as a header does.
            only = available[0] if data.header else str(next(iter(dataset[:1].values()), [""])[0])
            if rows.textual and len(available) == 1 and (remedy := tables.unseparated(rows.where, only)):
                raise UserError(f"{rows.where}: its first line is one column, '{brief(only)}'{remedy}")
            if not data.header:
                raise UserError(f"{told} 0 to {len(available) - 1}, counted from 0; next: data.columns.{role}=NUMBER")
            unread = [name for name in available if name not in columns.values()]
            way_on = f"{nearest(column, unread)}; next: data.columns.{role}=NAME for the one that it is"
            # Roles that not every data set has: one that the recipe names may be left out, or else another be named.
            free = [name for name, field in type(data.columns).model_fields.items() if field.default is None]
            if role in free and getattr(data.columns, role) is not None:
                way_on += f", or data.columns.{role}=null where there is none"
            elif role in free:
                others = (name for name in free if getattr(data.columns, name) is None and name != role)
                way_on += f", or, for rows of another form, {', '.join(f'data.columns.{name}' for name in others)}"
            if rows.textual:
                way_on += ", or data.header=false where the first line is a row"
            raise UserError(f"{told} {', '.join(map(brief, available))}{way_on}")
    if SYSTEM in type(data.columns).model_fields and SYSTEM in available and SYSTEM not in columns.values():
        told = f"{rows.where}: the column '{SYSTEM}' is not read; next: data.columns.{SYSTEM}={SYSTEM}"
        notices.warn_user(f"{told} puts its words before each conversation")
    dataset = dataset.select_columns(list(dict.fromkeys(columns.values())))
    renamed = dataset.rename_columns({column: role for role, column in columns.items() if role != column})
    return rows.with_columns(renamed)


def _note_empty(rows: Rows) -> Rows:
    """Note how many rows have no text in a column that is read as one. Raises UserError where none has any, and for a
    split without rows.

    Rows of nothing but text are paragraphs, with empty lines between them.
    """
    import pyarrow.compute

    if len(rows.dataset) == 0:
        raise UserError(f"{rows.where}: {formats.NO_ROWS}")
    roles, features = rows.dataset.column_names, rows.dataset.features
    notes = []
    for role in (role for role in READ if role in roles and getattr(features[role], "dtype", "") == "string"):
        trimmed = pyarrow.compute.utf8_trim_whitespace(rows.dataset.select_columns(role).with_format("arrow")[:][role])
        empty = pyarrow.compute.sum(pyarrow.compute.equal(trimmed, "")).as_py() or 0
        if empty == len(rows.dataset):
            raise UserError(f"{rows.where}: every row has an empty {role}; allowed: text in the column")
        if empty and len(roles) > 1:
            notes.append(f"{empty} of {len(rows.dataset)} rows have an empty {role}")
    return replace(rows, notes=(*rows.notes, *notes))


def _held_out(rows: Rows, share: float, seed: int, together: str | None) -> dict[str, Rows]:
    """Split the training rows in two, seeded. Raises UserError where one side would be empty.

    Rows with equal values in column `together` stay on one side: the validation split then ends with the group that
    reaches its share.
    """
    count = len(rows.dataset)
    wanted = round(count * share)
    groups: dict[Any, list[int]] = {}
    for number, value in enumerate(rows.dataset[together] if together else range(count)):
        groups.setdefault(value, []).append(number)
    # Whole groups are drawn: the share is reached or passed, never split a group.
    members, order = list(groups.values()), _shuffled(len(groups), seed)
    kept_back: list[int] = []
    taken = 0
    while len(kept_back) < wanted and taken < len(order):
        kept_back += members[order[taken]]
        taken += 1
    if taken in (0, len(order)):
        of = f" in {len(groups)} groups of one {together}" if together else ""
        problem = f"data.hold_out={share} of {counted(count, 'row')}{of} leaves one split without rows"
        raise UserError(f"{rows.where}: {problem}; next: more rows, or a separate validation split")
    rest = [number for place in order[taken:] for number in members[place]]
    validation = rows.sample(sorted(kept_back), f"{rows.where} (held out)")
    return {"train": rows.sample(sorted(rest)), "validation": validation}


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


# Folders where a split of a `data.folder` may be, unless `data.splits` says.
FOLDERS = {"train": ("train", "training"), "validation": ("validation", "valid", "val", "dev", "eval", "test")}
# Metadata files of a folder, as in the hub's image and audio folders, and their column with the file's name.
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
FILE_NAME = "file_name"
# One of several files, as the hub names them: train-00001-of-00004.parquet.
SHARD = re.compile(r"-\d{5}(-of-(?!00001)\d{5})")
# Formats of plain rows.
PLAIN = ("csv", "tsv", "json", "jsonl", "parquet", "xlsx", "text")
# A path below the recipes' folder; and the rows of a recipe without `data.rows`.
PAIRS = Path("data", "paraphrases.tsv")
GENERATED = {"train": 2000, "validation": 500}


def read(data: schema.Data, split: str) -> Rows:
    """Return one split's rows as their source has them, images and sound undecoded. Raises UserError."""
    if data.source == "files":
        rows = _joined([_local(data, path, name) for path, name in split_files(data, split)], (data.files or {})[split])
    else:
        rows = {"hub": _hub, "folder": _folder, "generated": _generated}[data.source](data, split)
    return rows.with_columns(undecoded(rows.dataset))


def split_files(data: schema.Data, split: str) -> list[tuple[Path, str]]:
    """Return each file of a split, with its name as a person knows it: one, or those of a pattern."""
    name = (data.files or {})[split]
    path = Path(name).expanduser()
    found = formats.found(path) or [path]
    return [(path, name)] if found == [path] else [(one, str(one)) for one in found]


def _joined(parts: list[Rows], where: str) -> Rows:
    """Return the rows of a pattern's files, one file after the other. Raises UserError for files that differ."""
    from datasets import concatenate_datasets

    first = parts[0]
    if len(parts) == 1:
        path = Path(where)
        if shard := SHARD.search(path.name):
            every = formats.in_shell(path.with_name(SHARD.sub(r"-*\1", path.name)))
            notices.warn_user(f"{where} is one of {int(shard[1][4:])} shards, and is read alone; all: {every}")
        return first
    for part in parts[1:]:
        if (part.dataset.features, part.folder) != (first.dataset.features, first.folder):
            differs = "is in another folder" if part.folder != first.folder else "has other columns, or of other types,"
            raise UserError(f"{part.where} {differs} than {first.where}; allowed: alike files in one folder")
    dataset = concatenate_datasets([part.dataset for part in parts])
    return replace(first, dataset=dataset, where=where, notes=tuple(note for part in parts for note in part.notes))


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
    if rows_inside := "" if inside else formats.pattern(root):
        raise UserError(f"data.folder: {data.folder} holds rows, no images or sound; next: data.train={rows_inside}")
    way_on = "" if data.splits else "; or data.hold_out=0.1 to keep a tenth of the training rows for validation"
    told = f"data.folder: {data.folder} holds no folder {' or '.join(names)} for the {split} split"
    raise UserError(f"{told}; there are: {', '.join(inside) or 'none'}{nearest(names[0], inside)}{way_on}")


@dataclass(frozen=True)
class Reading:
    """How a file is read: its format, `make`, which goes through its rows, all that this depends on, and notes."""

    kind: str
    options: tuple[Any, ...]
    make: Callable[[], Tables]
    notes: tuple[str, ...] = ()


def _local(data: schema.Data, path: Path, name: str, further: Collection[str] = ()) -> Rows:
    """Return the rows of the file `path`, called `name` to a person, with `further` columns beside the task's."""
    kind = formats.kind(path)
    found = reading(data, path, name, data.TEXT if kind == "text" else str(kind), further)
    dataset = cached(path, found.options, found.make)
    return Rows(dataset, name, textual=found.kind in TABLES, folder=path.parent, notes=found.notes)


def reading(data: schema.Data, path: Path, name: str, kind: str, further: Collection[str] = ()) -> Reading:
    """Return how a file of the format `kind` is read for the columns of `data`.

    Raises UserError for CoNLL's columns where the task has no words and tags.
    """
    data, roles = data.of_file(path), data.columns.roles()
    if kind in ("csv", "tsv"):
        make = partial(tables.separated, path, name, header=data.header)
        return Reading(kind, (kind, data.header), make, tables.separated_notes(path))
    if kind == "xlsx":
        make = partial(tables.sheet, path, name, header=data.header)
        return Reading(kind, (kind, data.header), make, tables.sheet_notes(path, name))
    if kind in ("json", "jsonl"):
        # `translation.en` needs the column `translation`.
        wanted = {".".join(column.split(".")[:end]) for column in (*roles.values(), *further) for end in range(1, 9)}
        lists = "words" in roles
        make = partial(json_rows.tables, path, name, wanted, data.field, lists=lists)
        return Reading(kind, (kind, data.field, sorted(wanted), lists), make)
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
    column, files, left = media(place)
    metadata = next((place / name for name in METADATA if (place / name).is_file()), None)
    if metadata is not None:
        # Read here: the builder of `datasets` would decode sound on the way, and needs torchcodec for it.
        described = _local(data, metadata, str(metadata), [FILE_NAME])
        there = described.dataset.column_names
        if FILE_NAME not in there:
            problem = f"there is no column {FILE_NAME}, which names the files; the columns are {', '.join(there)}"
            raise UserError(f"{metadata}: {problem}")
        named = {os.path.normpath(place / str(value)) for values in described.dataset[:].values() for value in values}
        unnamed = [file for file in files if os.path.normpath(file) not in named]
        notes = _left_out(unnamed, f"that {metadata.name} does not name")
        described = replace(described, notes=(*described.notes, *notes))
        return described.with_columns(described.dataset.rename_column(FILE_NAME, column))
    if "label" in data.columns.roles().values() and (stray := [file for file in files if file.parent == place]):
        raise UserError(f"{stray[0]}: is in no folder of a class; allowed: a folder for each class, with its files")
    notes = _left_out(left, "of another kind")
    # Names and not numbers: each split would number its own classes.
    rows = [{column: str(file.resolve()), "label": file.parent.name} for file in files]
    return Rows(Dataset.from_list(rows), str(place), folder=place, notes=notes)


def _left_out(files: list[Path], which: str) -> tuple[str, ...]:
    return (f"without {counted(len(files), 'file')} {which}, as {files[0].name}",) if files else ()


def media(folder: Path) -> tuple[str, list[Path], list[Path]]:
    """Return whether a folder holds images or sound, whichever is more frequent, its files of that kind, and the rest.

    Both in order, with those of the folders inside it and without hidden ones. Raises UserError where it holds neither.
    """
    from datasets.packaged_modules.audiofolder.audiofolder import AudioFolder
    from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")
    kinds = {"image": set(ImageFolder.EXTENSIONS), "audio": set(AudioFolder.EXTENSIONS)}
    found = {kind: [file for file in files if file.suffix.lower() in known] for kind, known in kinds.items()}
    most = max(found, key=lambda kind: len(found[kind]))
    if not found[most]:
        raise UserError(f"{folder}: holds neither images nor sound; allowed: a folder for each class with files in it")
    taken = set(found[most])
    return most, found[most], [file for file in files if file not in taken]


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
        if Path(data.hub).is_dir():
            told = f"data {where}: the folder cannot be read: {first_line(root).rstrip('.')}"
            raise UserError(f"{told}; next: {instead}") from error
        download = f"hf download {data.hub} --repo-type dataset"
        raise UserError(unreachable(f"data {where}", download, instead, first_line(root))) from error
    local = Path(data.hub)
    return Rows(dataset, where, folder=local if local.is_dir() else None)


def _generated(data: schema.Data, split: str) -> Rows:
    """Return the first paraphrase pairs of a split, as many as the recipe wants; they are beside the recipes."""
    import pyarrow
    import pyarrow.compute

    path = catalogue.folder() / PAIRS

    def pairs() -> Tables:
        """Yield the rows of the split with integer labels; the table's own values are text."""
        for table in tables.separated(path, path.name):
            rows = table.filter(pyarrow.compute.equal(table["split"], split)).drop_columns("split")
            # The third of the columns that are left: two sentences come before it.
            yield rows.set_column(2, "label", rows["label"].cast(pyarrow.int64()))

    dataset = cached(path, ["pairs", split], pairs)
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
