"""The keys that a recipe may have, by task, read from the classes that validate them. Imports no torch."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from hf_mps.core.errors import UserError
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue, training_section
from hf_mps.finetune.recipe.catalogue import read_yaml
from hf_mps.finetune.recipe.training_section import TRAINING_ARGUMENTS


@dataclass(frozen=True)
class Key:
    """A dotted key: its values in words, its default as YAML (empty where the key is required), and what it means."""

    name: str
    kind: str
    default: str
    meaning: str


def training(task: str) -> list[Key]:
    """Return the fields that `training` takes for a task. Raises UserError where their library is not installed."""
    kind = tasks.find(task)
    known = training_section.fields(kind.arguments_source or TRAINING_ARGUMENTS)
    refused = training_section.set_elsewhere(kind.settled, known)
    free = [field for name, field in known.items() if name not in refused]
    return [Key(f"training.{one.name}", training_section.allowed(one), "", one.meaning) for one in free]


def of_recipe(recipe: str) -> list[Key]:
    """Return every key that the recipe called `recipe`, or any of that task, may have.

    Raises UserError where there is neither such a recipe nor such a task.
    """
    task = recipe if recipe in tasks.names() else read_yaml(catalogue.find(recipe).path).values.get("task")
    if task not in tasks.names():
        raise UserError(f"{recipe} has no task")
    found = [*of_class(tasks.find(task).recipe_class), *training(task)]
    return [replace(key, kind=task) if key.name == "task" else key for key in found]


def of_class(kind: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a recipe's class other than `training`, in their order; dotted ones of a section."""
    for name, field in kind.model_fields.items():
        kinds = (one for one in _union(field.annotation) if isinstance(one, type) and issubclass(one, BaseModel))
        if (section := next(kinds, None)) is not None:
            yield from of_class(section, f"{prefix}{name}.")
        if section is not None or name == "training":
            continue
        value = None if field.is_required() else field.get_default(call_default_factory=True)
        default = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        default = "" if field.is_required() else "empty" if value in ([], {}) else default
        meaning = " ".join((field.description or "").split())
        yield Key(f"{prefix}{name}", _type_words(field.annotation), default, meaning)


def _union(annotation: Any) -> list[Any]:
    """Return the members of a union without None; a plain type alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [one for one in get_args(annotation) if one is not type(None)]
    return [annotation]


def _type_words(annotation: Any) -> str:
    """Return a type in plain words: `integer`, `list of text`, the values of a Literal."""
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any"}
    parts = []
    for kind in _union(annotation):
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Annotated:
            parts.append(_type_words(inner[0]))
        elif origin is Literal:
            parts.append(", ".join(map(str, inner)))
        elif origin is list:
            parts.append(f"list of {_type_words(inner[0])}")
        elif origin is dict:
            parts.append(f"mapping of {_type_words(inner[0])} to {_type_words(inner[1])}")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            parts.append(f"sections of {', '.join(kind.model_fields)}")
        else:
            parts.append(plain.get(kind, getattr(kind, "__name__", str(kind))))
    return " or ".join(parts)
