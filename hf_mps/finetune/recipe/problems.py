"""A recipe's mistakes in words: pydantic's errors as a dotted key, the given value and the allowed ones."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hf_mps.core.errors import nearest
from hf_mps.finetune.recipe.yaml import SHOWN, Document

# The splits that the command line names without `files`.
SHORT = ("train", "validation", "test")
# pydantic's kinds of error (docs.pydantic.dev, "Validation Errors") in words of YAML, with the bound that each carries.
ALLOWED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a section of keys, such as {{a: b}}",
    "model_type": "a section of keys, such as {{a: b}}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "at least {min_length} of them",
    "string_too_short": "at least {min_length} letter",
}
REMOVED = {
    "link": (
        "was removed: gradients are sent whole at every step; leave it out (in a script of your own,"
        " accelerate's DistributedDataParallelKwargs(comm_hook=…) compresses them and its LocalSGD averages weights)"
    ),
    "speedups": "is called optimizations now; next: optimizations=false or true",
    "data.broken_rows": "is called data.max_bad_row_fraction now; next: data.max_bad_row_fraction=0.001",
}
"""Keys that earlier releases had, with what to do instead."""
# The last part of an error's place where a value may be of several types: the type that was tried, no key.
TRIED = re.compile(r"(str|int|float|bool|list|dict|literal)(\[.*\])?")


@dataclass(frozen=True)
class Problem:
    """A mistake: its origin (`my.yaml:3`, `command line`), the dotted key, and what is wrong."""

    where: str
    key: str
    text: str
    unchecked: bool = False
    """Nothing is known to be wrong: the library that would say so is not installed."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, f"{self.key} {self.text}".strip())))


def clauses(error: ValidationError, kind: type[BaseModel], document: Document) -> list[tuple[str, str]]:
    """Return the dotted key and a clause for each mistake; a value that fits none of several types is one mistake."""
    by_key: dict[str, str] = {}
    for details in error.errors():
        parts = [str(part) for part in details["loc"] if part != "[key]"]
        if len(parts) > 1 and TRIED.fullmatch(parts[-1]):
            parts.pop()
        key, clause = ".".join(parts) or "the recipe", _clause(details, kind, document)
        said = by_key.setdefault(key, clause)
        # `is 3; allowed: text` and `is 3; allowed: a list` become one clause.
        came, allowed, more = clause.partition("; allowed: ")
        if allowed and said.startswith(came + allowed) and more not in said.removeprefix(came + allowed).split(" or "):
            by_key[key] = f"{said} or {more}"
    return list(by_key.items())


def _clause(details: ErrorDetails, kind: type[BaseModel], document: Document) -> str:
    location, value = details["loc"], details.get("input")
    if details["type"] == "extra_forbidden":
        if (dotted := ".".join(map(str, location))) in REMOVED:
            return REMOVED[dotted]
        allowed = _keys(kind, location[:-1])
        if location[:-1] == ("data",) and document.where(f"data.{location[-1]}") == "command line":
            allowed += [*SHORT, *(_keys(kind, ("data", "columns")) if "columns" in allowed else ())]
        return f"is not a key here; allowed: {', '.join(allowed)}{nearest(str(location[-1]), allowed)}"
    if details["type"] == "missing":
        return "is missing; give it"
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    if (
        "[key]" in location or details["type"] == "invalid_key"
    ):  # a mapping's key is what is wrong, and stands at the end of the dotted name
        return "is not text; allowed: keys that are text"
    if details["type"] == "literal_error":
        values = details["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return f"is {_shown(value)}; allowed: {values}{nearest(str(value), values.split(', '))}"
    words = ALLOWED.get(details["type"])
    allowed_words = words.format(**details.get("ctx", {})) if words else details["msg"].removeprefix("Input should be ")
    return f"is {_shown(value)}; allowed: {allowed_words}"


def _shown(value: Any) -> str:
    """Return a given value as YAML."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _keys(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the section at `location` knows."""
    here: type[BaseModel] = kind
    for part in location:
        field = here.model_fields.get(str(part))
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)] if field else []
        sections = [t for t in inner if issubclass(t, BaseModel)]
        if not sections:
            break
        here = sections[0]
    return list(here.model_fields)
