"""Functions and classes that moved or went, under the names that older scripts import.

`name_table.NAMES` says what took the place of each. Needless, name by name, where the module still has it: the names
are found when they are asked for and stock's own way has none, so that nothing is imported or listed before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from hf_mps.core.notices import asked_by_a_library, print_notice
from hf_mps.core.patching import MISSING, Patcher, Put
from hf_mps.layer.compat.name_table import NAMES, Old


@functools.cache
def places() -> dict[str, dict[str, Old]]:
    """The old names of each module."""
    found: dict[str, dict[str, Old]] = {}
    for old in NAMES:
        for place in old.places:
            found.setdefault(place, {})[old.name] = old
    return found


class Finder(Put):
    """A module finds the names of the table that it lacks."""

    def put(self, owner: Patcher, place: ModuleType, name: str, stock: Any) -> None:
        """Give it a `__getattr__` around its own, if it has one."""
        if "names" not in getattr(stock, "hf_mps_patches", ()):
            setattr(place, name, _finder(place, stock))


def _finder(module: ModuleType, stock: Any) -> Callable[[str], Any]:
    gone = places()[module.__name__]

    def __getattr__(name: str) -> Any:
        if stock is not MISSING:
            try:
                return stock(name)
            except AttributeError:
                if name not in gone:
                    raise
        if name not in gone or _lazily_there(module, name):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return _stands_for(gone[name], f"{module.__name__}.{name}")

    __getattr__.hf_mps_patches = ("names",)  # type: ignore[attr-defined]
    return __getattr__


def _lazily_there(module: ModuleType, name: str) -> bool:
    """Whether a lazy module of transformers has the name itself; it is asked after a module's own __getattr__."""
    listed = ("_class_to_module", "_objects", "_object_missing_backend", "_modules")
    return any(name in (vars(module).get(each) or ()) for each in listed)


def _stands_for(old: Old, name: str) -> Any:
    if old.called:
        return _told(name, old.instead, old.thing)
    if old.instead and not asked_by_a_library():
        print_notice(f"{name}: {old.instead}")
    return _resolve(old.thing)


def _resolve(thing: str) -> Any:
    module, _, name = thing.partition(":")
    return getattr(import_module(module), name)


@functools.cache
def _told(name: str, instead: str, thing: str) -> Callable[..., Any]:
    """The function that takes the place of `name`, saying so in one line when it is first called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        print_notice(f"{name}: {instead}")
        return _resolve(thing)(*args, **kwargs)

    call.__name__ = call.__qualname__ = name.rpartition(".")[2]
    return call


patches = {f"{module}:__getattr__": Finder("__getattr__", own=True, optional=True) for module in places()}
