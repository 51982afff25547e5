"""Objects as the text that ranks send each other: values, and the classes of hf_mps that hold nothing but values.

Whoever can reach the launcher's store can write there, so nothing of it is unpickled: a message can only become plain
values, and objects of this package's own dataclasses, named tuples and recipes, which are filled without being called.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

from pydantic import BaseModel

from hf_mps.core.files import bare

PACKAGE = "hf_mps"
KIND, VALUE = "kind", "value"


class BrokenMessage(ValueError):
    """A text that no rank of hf_mps has written."""


def packed(value: Any) -> bytes:
    """Return the message that holds `value`. Raises TypeError for an object that is none of those above."""
    return json.dumps(_plain(value)).encode()


def unpacked(message: bytes) -> Any:
    """Return the value of a message. Raises BrokenMessage for any other bytes."""
    try:
        return _whole(json.loads(message))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, ImportError) as error:
        raise BrokenMessage(f"no message of this package: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool) or type(value) in (int, float, str):
        return value
    if isinstance(value, PurePath):
        return {KIND: "path", VALUE: str(value)}
    if isinstance(value, bytes):
        return {KIND: "bytes", VALUE: base64.b64encode(value).decode()}
    if type(value) is list:
        return [_plain(each) for each in value]
    if type(value) in (tuple, set, frozenset):
        return {KIND: type(value).__name__, VALUE: [_plain(each) for each in value]}
    if isinstance(value, Mapping):
        return {KIND: "dict", VALUE: [[_plain(key), _plain(each)] for key, each in value.items()]}
    kind = type(value)
    if kind.__module__.partition(".")[0] == PACKAGE and (names := _fields(kind)) is not None:
        own = {name: _plain(getattr(value, name)) for name in names}
        return {KIND: f"{kind.__module__}:{kind.__qualname__}", VALUE: own}
    if isinstance(value, int | float | str):
        return bare(value)
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__} is no message between ranks")


def _whole(given: Any) -> Any:
    if isinstance(given, list):
        return [_whole(each) for each in given]
    if not isinstance(given, dict):
        return given
    kind, value = given[KIND], given[VALUE]
    if kind in SIMPLE:
        return SIMPLE[kind](value)
    module, _, name = kind.partition(":")
    if module.partition(".")[0] != PACKAGE:
        raise BrokenMessage(f"{kind} is not of {PACKAGE}")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    names = _fields(found)
    if names is None or found.__module__ != module or set(value) != set(names):
        raise BrokenMessage(f"{kind} does not have these fields")
    filled = {key: _whole(each) for key, each in value.items()}
    if issubclass(found, tuple):
        return tuple.__new__(found, [filled[key] for key in names])
    if issubclass(found, BaseModel):
        recipe = found.model_construct(**{key: filled[key] for key in found.model_fields})
        for key in found.__private_attributes__:
            setattr(recipe, key, filled[key])
        return recipe
    made = object.__new__(found)
    for key, each in filled.items():
        object.__setattr__(made, key, each)
    return made


def _fields(kind: Any) -> tuple[str, ...] | None:
    """The names of the values that a class holds; None for a class that is no dataclass, named tuple or recipe."""
    if not isinstance(kind, type):
        return None
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    if issubclass(kind, BaseModel):
        return (*kind.model_fields, *kind.__private_attributes__)
    named: tuple[str, ...] | None = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return named


SIMPLE: dict[str, Callable[[Any], Any]] = {
    "path": Path,
    "bytes": base64.b64decode,
    "tuple": lambda value: tuple(map(_whole, value)),
    "set": lambda value: set(map(_whole, value)),
    "frozenset": lambda value: frozenset(map(_whole, value)),
    "dict": lambda value: {_whole(key): _whole(each) for key, each in value},
}
