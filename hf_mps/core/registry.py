"""Everything that patches libraries, by its name: which is on, and after which module each is armed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_mps.core.import_hooks import Catalogue
    from hf_mps.core.patching import Patcher


class Registry:
    """The patchers of some catalogues, each made when it is first asked for."""

    def __init__(self, *catalogues: Catalogue, started: bool = False) -> None:
        self.catalogues = {catalogue.kind: catalogue for catalogue in catalogues}
        self.started = started
        self._off: frozenset[str] = frozenset()
        self._only: frozenset[str] | None = None
        self._made: dict[str, Any] = {}

    def start(self, off: frozenset[str] = frozenset(), only: frozenset[str] | None = None) -> None:
        """Arm what belongs to torch itself, but those that the user wants `off`; once in a process.

        Where `only` is given, all others stay as they were. What belongs to a library follows when that is imported
        (hf_mps.core.import_hooks).
        """
        if self.started:
            return
        self.started, self._off, self._only = True, off, only
        for kind in self.catalogues:
            self.install(kind, sys.modules["torch"])

    def install(self, kind: str, module: ModuleType) -> None:
        """Arm what the catalogue of a kind names for `module`, in its order; nothing before `start`."""
        for name in self.catalogues[kind].after.get(module.__name__, ()) if self.started else ():
            if name in self._off or not self.arms(name):
                continue
            patcher = self.get(name)
            try:
                patcher.install(module)
            except Exception as error:
                patcher.unknown(module, error)

    def arms(self, name: str) -> bool:
        """Return whether `start` was called for it."""
        return self.started and (self._only is None or name in self._only)

    def get(self, name: str) -> Any:
        """Return one by its name. Raises UserError for one that there is not."""
        if name not in self._made:
            catalogue = next((each for each in self.catalogues.values() if name in each.names), None)
            if catalogue is None:
                from hf_mps.core.errors import UserError, nearest  # here, as every `import torch` loads this file

                names = [each for catalogue in self.catalogues.values() for each in catalogue.names]
                kind = next(iter(self.catalogues))
                raise UserError(f"{name} is no {kind}; there are {', '.join(names)}{nearest(name, names)}")
            self._made[name] = catalogue.make(name)
            self._made[name].off_by_user = name in self._off
        return self._made[name]

    def each(self, kind: str) -> list[Any]:
        """Return those of a kind, in the catalogue's order."""
        return [self.get(name) for name in self.catalogues[kind].names]

    def made(self, kind: str) -> list[Any]:
        """Those of a kind that were made in this process, in the catalogue's order."""
        return [self._made[name] for name in self.catalogues[kind].names if name in self._made]

    @contextmanager
    def suspended(self, *names: str, kind: str) -> Iterator[None]:
        """Switch single ones off for a while, or all of a kind where no name is given. UserError for a wrong name."""
        patchers = [self.get(name) for name in names or self.catalogues[kind].names]
        for each in patchers:
            each.suspended += 1
            each.switched(False)
        try:
            yield
        finally:
            # Counted, as one context may stand within another.
            for each in patchers:
                each.suspended -= 1
                each.switched(each.on)

    def patchers(self) -> list[Patcher]:
        """Return the patchers of every kind, in the catalogues' order; imports their files, and no library."""
        return [
            catalogue.make(name) if name in catalogue.shared else self.get(name)
            for catalogue in self.catalogues.values()
            for name in (*catalogue.shared, *catalogue.names)
        ]


def registry_of(*catalogues: Catalogue, started: bool = False) -> Callable[[], Registry]:
    """Return what gives the registry of this process for some catalogues, made when it is first asked for."""
    return functools.cache(functools.partial(Registry, *catalogues, started=started))
