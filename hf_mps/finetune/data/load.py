"""The rows of a recipe, with the columns that the task reads under the names of their roles.

`sources` knows where they come from (hub, files, folder, generated). Everything is read through `datasets`, so that
rows and what is made of them are cached below the user's HF_HOME.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_mps.core import notices
from hf_mps.core.errors import UserError, brief, nearest, neighbour
from hf_mps.finetune.data import formats, sources, tables
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.recipe import schema

__all__ = ["SPLITS", "Rows", "check", "load"]

SPLITS = ("train", "validation")
# The formats that `data.field` and `data.header` have a meaning for.
NESTED = ("json", "jsonl")
# Roles of texts that say nothing where they are empty; others may be (Alpaca's `input`).
READ = ("text", "text_pair", "negative", "source", "target", "context", "question", "instruction", "output")
TABLES = ("csv", "tsv", "xlsx")

SYSTEM = "system"
"""The role and the column of a system's words, which ShareGPT's rows have beside their conversation."""


def check(data: schema.Data) -> None:
    """Refuse missing files and unknown formats before anything heavy is imported. Raises UserError."""
    if data.streaming:
        from hf_mps.finetune.stream import streamed  # six modules that only a streamed run needs

        streamed.check(data)
        return
    for split, name in (data.files or {}).items():
        path = Path(name).expanduser()
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
            sources.split_folder(data, split)


def splits_to_read(data: schema.Data) -> list[str]:
    """Return the splits to read from the source: `train`, `validation` unless it is held out, and any further one."""
    named = (data.files if data.files else data.splits) or {}
    held = ("validation",) if data.hold_out else ()
    return [split for split in dict.fromkeys((*SPLITS, *named)) if split not in held]


def refuse_unread(rows: Mapping[str, Rows], read: Collection[str], task: str) -> None:
    """Raise UserError for a split that the task would load in vain."""
    for split in rows:
        if split not in read:
            raise UserError(f"data names a split {split}, which {task} does not measure; allowed: {', '.join(SPLITS)}")


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
    read = [split for split in splits_to_read(data) if not only or split in wanted]
    found = {split: _note_empty(narrow(sources.read(data, split), columns, data)) for split in read}
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
            free = [name for name in available if name not in columns.values()]
            way_on = nearest(column, free) or f"; next: data.columns.{role}=NAME for the one that it is"
            field = type(data.columns).model_fields.get(role)
            if field is not None and field.default is None:  # a role that not every data set has
                way_on += f", or data.columns.{role}=null where there is none"
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
        problem = f"data.hold_out={share} of {count} rows{of} leaves one split without rows"
        raise UserError(f"{rows.where}: {problem}; next: more rows, or a separate validation split")
    rest = [number for place in order[taken:] for number in members[place]]
    validation = rows.sample(sorted(kept_back), f"{rows.where} (held out)")
    return {"train": rows.sample(sorted(rest)), "validation": validation}


def _shuffled(count: int, seed: int) -> list[int]:
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order
