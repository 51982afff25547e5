"""A post-import hook: has a library's module patched after it was executed, whenever that happens."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

Arm = Callable[[ModuleType, str], None]

applied: dict[tuple[str, str], str] = {}
"""Module and who patches it -> "on", or why that could not be switched on."""


class IntegrationWarning(UserWarning):
    """A library could not be switched on; it then does what it does without hf_mps."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage while the context lasts; of imports, what a module makes lives on, and each collection would
    look through all of it again.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def start(table: Mapping[str, tuple[str, ...]], arm: Arm) -> None:
    """Watch for the modules of `table`, and have `arm(module, who)` called for each who that it names.

    It is called at once for modules that were imported already. Calling it again adds modules.
    """
    finder = next((finder for finder in sys.meta_path if isinstance(finder, _Finder)), None)
    # First in the list: whoever finds the module before it would hide it.
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.table |= {name: (who, arm) for name, who in table.items()}
    for name, who in table.items():
        module = sys.modules.get(name)
        if module is None or all((name, each) in applied for each in who):
            continue
        spec = module.__spec__
        if spec is not None and getattr(spec, "_initializing", False):
            _Unfinished.table[name] = who, arm
            spec.__class__ = _Unfinished
        else:
            apply(module, who, arm)


def apply(module: ModuleType, who: tuple[str, ...], arm: Arm) -> None:
    """Call `arm` for each; one that fails ends in a warning and leaves the library as it is."""
    name = module.__name__
    module = sys.modules.get(name, module)  # transformers puts another object in its module's place
    for each in who:
        if (name, each) in applied:
            continue
        try:
            arm(module, each)
            applied[name, each] = "on"
        except Exception as error:
            applied[name, each] = f"{type(error).__name__}: {error}"
            words = f"hf_mps does not know this version of {name} ({applied[name, each]}): {each} is off for it"
            warnings.warn(words, IntegrationWarning, stacklevel=2)


@dataclass(eq=False)
class Catalogue:
    """Those of one kind: module of a library -> who is armed after it, with spaces between. Imports nothing.

    `home(name)` is the module of ours in which one is written; `load(module, name)` finds the Patcher in it. Of several
    around one function the first is the innermost. `shared` names files whose patches serve several of them.
    """

    kind: str
    table: Mapping[str, str]
    home: Callable[[str], str]
    load: Callable[[ModuleType, str], Any]
    shared: tuple[str, ...] = ()

    @functools.cached_property
    def after(self) -> dict[str, tuple[str, ...]]:
        """The same table with tuples."""
        return {module: tuple(names.split()) for module, names in self.table.items()}

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each, once."""
        return tuple(dict.fromkeys(name for names in self.after.values() for name in names))

    def make(self, name: str) -> Any:
        """Import the file in which it is written."""
        return self.load(importlib.import_module(self.home(name)), name)

    def waits(self, name: str) -> str | None:
        """In words which imports `name` waits for, or None where one of its modules is there."""
        modules = [module for module, names in self.after.items() if name in names]
        if any(module in sys.modules for module in modules):
            return None
        return f"for the import of {' or '.join(modules)}"


def of_file(module: ModuleType, name: str, *, kind: str, safe: bool) -> Any:
    """Load one of a catalogue whose members are a file each: `hf_mps.core.patching.ModulePatcher`."""
    from hf_mps.core.patching import ModulePatcher  # here, as every `import torch` loads this file

    return ModulePatcher(kind, module, safe=safe)


class _Unfinished(ModuleSpec):
    """The spec of a module that is being executed now, which tells us when that is over.

    `from transformers import TrainingArguments` executes training_args, which imports torch, which loads this layer:
    the finder comes too late for that module and its class does not exist yet.
    """

    table: ClassVar[dict[str, tuple[tuple[str, ...], Arm]]] = {}

    @property
    def _initializing(self) -> bool:
        return bool(self.__dict__.get("_initializing", False))

    # The import system ends every import with `spec._initializing = False` (importlib._bootstrap._load_unlocked).
    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        self.__dict__["_initializing"] = value
        if not value:
            who, arm = self.table[self.name]
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            if (module := sys.modules.get(self.name)) is not None:  # gone where the import failed
                apply(module, who, arm)


class _Finder:
    """Finds nothing itself: asks the other finders and puts a loader around theirs, for the watched names only."""

    def __init__(self) -> None:
        self.table: dict[str, tuple[tuple[str, ...], Arm]] = {}
        self._asking = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.table or getattr(self._asking, "now", False):
            return None
        # The other finders may ask `find_spec` of importlib, which comes back here.
        self._asking.now = True
        try:
            finders = (other for other in list(sys.meta_path) if other is not self and hasattr(other, "find_spec"))
            spec = next(filter(None, (other.find_spec(fullname, path, target) for other in finders)), None)
        finally:
            self._asking.now = False
        if spec is not None and spec.loader is not None and not isinstance(spec.loader, _Loader):
            # A loader by its methods.
            spec.loader = _Loader(spec.loader, *self.table[fullname])  # type: ignore[assignment]
        return spec


class _Loader:
    """The library's own loader with one thing behind it; leaves no trace in the module."""

    def __init__(self, stock: Any, who: tuple[str, ...], arm: Arm) -> None:
        self._stock, self._who, self._arm = stock, who, arm

    def __getattr__(self, name: str) -> object:
        # The import system has a loader create the module; inspect, pkgutil and importlib.resources ask for its source
        # and files before it has run.
        return getattr(self._stock, name)

    def exec_module(self, module: ModuleType) -> None:
        # Before the module runs, whose own code may ask for its loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._stock
        module.__loader__ = self._stock
        with uncollected():
            self._stock.exec_module(module)
        apply(module, self._who, self._arm)
