"""Rows that lie inside a JSON document: SQuAD's questions within paragraphs within articles, for instance."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.errors import UserError, nearest

if TYPE_CHECKING:
    from datasets import Dataset


def load(path: Path, name: str, field: str) -> Dataset:
    """The rows at `field` of the JSON file (or the lines of JSON) `path`, kept by `datasets` under the file's content.

    Raises UserError, calling the file `name`, for what is no JSON and for a field that leads to no rows.
    """
    import hashlib

    from datasets import Dataset
    from datasets.exceptions import DatasetGenerationError

    content = path.read_bytes()
    document = _document(content, path, name)
    made = list(_explode(document, field.split("."), {}, name, field))
    if not made:
        raise UserError(f"{name}: data.field {field} holds no rows; allowed: at least one")
    digest = hashlib.sha256(content).hexdigest()
    try:
        return Dataset.from_generator(_rows, gen_kwargs={"path": str(path.resolve()), "field": field, "digest": digest})
    except DatasetGenerationError as error:
        raise UserError(f"{name}: the rows at data.field {field} differ in the types of their columns") from error


def _rows(path: str, field: str, digest: str) -> Iterator[dict[str, Any]]:
    """The rows again, for `datasets` to write; `digest` is unused here, it tells apart what the file held."""
    document = _document(Path(path).read_bytes(), Path(path), path)
    yield from _explode(document, field.split("."), {}, path, field)


def _document(content: bytes, path: Path, name: str) -> Any:
    try:
        text = content.decode("utf-8-sig")
        return [json.loads(line) for line in text.splitlines() if line] if path.suffix == ".jsonl" else json.loads(text)
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: is not UTF-8 text (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{name}: cannot be read as {path.suffix[1:]}: {error}") from error


def _explode(here: Any, path: list[str], around: dict[str, Any], name: str, field: str) -> Iterator[dict[str, Any]]:
    """Each dict at the end of `path`, with the plain values (text, numbers) of the dicts around it."""
    if isinstance(here, list):
        for item in here:
            yield from _explode(item, path, around, name, field)
    elif not isinstance(here, dict):
        raise UserError(f"{name}: data.field {field} leads to a {type(here).__name__}; allowed: lists of dicts")
    elif not path:
        yield around | here
    elif path[0] not in here:
        there = ", ".join(map(str, here))
        raise UserError(
            f"{name}: data.field {field}: there is no '{path[0]}'; there are {there}{nearest(path[0], map(str, here))}"
        )
    else:
        plain = {key: value for key, value in here.items() if not isinstance(value, (list, dict))}
        yield from _explode(here[path[0]], path[1:], around | plain, name, field)
