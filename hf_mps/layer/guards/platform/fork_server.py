"""Workers of a data loader as new processes: a server that forks them, and whether they can do the loader's work."""

from __future__ import annotations

import ast
import functools
import os
import re
import symtable
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from hf_mps.core.text import first_line
from hf_mps.metal.device import machine, probe
from hf_mps.metal.device.choice import metal

_DEFAULT = ["__main__"]  # what is imported where nobody called set_forkserver_preload (multiprocessing/forkserver.py)


@dataclass(frozen=True)
class Inherited:
    """What a forked worker has from its parent beside its objects, and multiprocessing does not send."""

    environment: dict[str, str]
    default_dtype: Any
    sharing: str

    @classmethod
    def now(cls) -> Inherited:
        """Of this process."""
        processes: Any = torch.multiprocessing
        return cls(dict(os.environ), torch.get_default_dtype(), processes.get_sharing_strategy())

    def put(self) -> None:
        """Let this process have it."""
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        os.environ.update(self.environment)
        torch.set_default_dtype(self.default_dtype)
        processes: Any = torch.multiprocessing
        processes.set_sharing_strategy(self.sharing)


class Worker(ForkServerProcess):
    """A process of the server's that finds what one forked from this process would have inherited."""

    _inherited: Inherited

    def start(self) -> None:
        """Have the server fork it."""
        with _verdict_handed_down():
            self._inherited = Inherited.now()
            super().start()

    def run(self) -> None:
        """In the new process: do the loader's work."""
        self._inherited.put()
        super().run()


class Workers(ForkServerContext):
    """A multiprocessing_context for a DataLoader."""

    Process = Worker


def start(uses: Iterable[str]) -> None:
    """Start the server, where none runs yet, with what the modules named `uses` and the script's own import.

    A list that the program gave to set_forkserver_preload stays as it is.
    """
    # The list can be set by a public function, and read nowhere but in the object behind that.
    server: Any = getattr(forkserver, "_forkserver", None)
    before = getattr(server, "_preload_modules", None)
    if before == _DEFAULT:
        forkserver.set_forkserver_preload(libraries(["__main__", *uses]))
    try:
        with _verdict_handed_down():
            forkserver.ensure_running()
    finally:
        if before == _DEFAULT:
            forkserver.set_forkserver_preload(before)


def libraries(names: Iterable[str]) -> list[str]:
    """Return the installed modules among `names`, and those that the others, the user's own, took something from.

    None of the user's code runs in the server: it may put something on the device.
    """
    modules, seen, left = ["torch"], {"torch"}, [*names]
    while left:
        name = left.pop()
        module = sys.modules.get(name)
        if module is None or name in seen:
            continue
        seen.add(name)
        if whose(name) == "library":
            modules.append(name)
        elif whose(name) == "user" or name == "__main__":
            left += [source for value in [*vars(module).values()] if (source := _source(value))]
    return modules


def _source(value: Any) -> str | None:
    """Return the name of the module that a module's global comes from."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else None


@contextmanager
def _verdict_handed_down() -> Iterator[None]:
    """Let what is started in here have this process's verdict on Metal: libraries ask for it when imported."""
    with patch.dict(os.environ):
        # To answer them itself the server would create the device, and fork workers from a process that has it.
        probe.hand_down(machine.present(), metal())
        yield


_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_PYTHONS = f"{Path(os.__file__).parent}{os.sep}"
_NAMED = re.compile(rb"c([\w.]+)\n([\w.]+)\n")  # the opcode of pickle's protocol 2 for what is sent by its name


@dataclass
class Sent:
    """What a loader's work is made of: why it cannot be sent, or empty; and the modules that it names."""

    obstacle: str = ""
    modules: set[str] = field(default_factory=set)


def sent(loader: Any) -> Sent:
    """Look at a DataLoader's dataset, collator and worker_init_fn; they are pickled, and nothing of that is kept."""
    from multiprocessing.reduction import ForkingPickler

    from torch import UntypedStorage
    from torch.multiprocessing.reductions import reduce_storage

    main: Any = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    # A package's own __main__ (python -m pytest) is not run again: multiprocessing/spawn.py, _fixup_main_from_name.
    package = getattr(getattr(main, "__spec__", None), "name", "").endswith("__main__")
    if file is not None and not package and not _read(Path(file)).guarded:
        return Sent(
            f'{Path(file).name} has no `if __name__ == "__main__":`, without which a new process runs it all again'
        )
    sink = _Sink()
    for what in ("dataset", "collate_fn", "worker_init_fn"):
        try:
            pickler: Any = ForkingPickler(sink, 2)
            # Torch's own reducer refuses what is on the device, and would move a tensor of the CPU into shared memory,
            # where a descriptor, or a count of readers, keeps it for the reader that never comes.
            reducers = pickler.dispatch_table
            reducers[UntypedStorage] = lambda it: (bytes, ()) if it.device.type == "cpu" else reduce_storage(it)  # type: ignore[no-untyped-call]
            pickler.dump(getattr(loader, what))
        except Exception as error:
            return Sent(f"the loader's {what} cannot be sent to a new process ({first_line(error)})")
    modules = {module for module, _ in sink.named}
    if file is None and "__main__" in modules:
        return Sent("the loader uses what a notebook or a prompt defined, which a new process does not know")
    for name in sorted(modules):
        missing = _made_by_the_run(name, {each for module, each in sink.named if module == name})
        if missing:
            return Sent(f"the loader may use {name}'s {missing}, which a new process does not have: the run sets it")
    return Sent(modules=modules)


def whose(name: str) -> str:
    """Who wrote a module: "python", a "library" that was installed, or the "user"; empty where that has no file."""
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    if any(each in file for each in _INSTALLED):
        return "library"
    if file.startswith(_PYTHONS):
        return "python"
    return "user" if file else ""


def _made_by_the_run(name: str, sent_by_name: set[str]) -> str:
    """A global of a module that only the run gives its value, and that the loader or a function may use; or empty."""
    if whose(name) != "user":
        return ""
    read = _read(Path(str(sys.modules[name].__file__)))
    made = read.set_by_functions | (read.set_by_main if name == "__main__" else set())
    return min(made & (read.used | {each.partition(".")[0] for each in sent_by_name}), default="")


@dataclass(frozen=True)
class _Read:
    """What a file's text tells: whether its outermost lines do nothing in a process that imports it, and its globals.

    Those that functions set (`global name`), those that the lines below `if __name__ == "__main__":` set, and those
    that its functions and classes use.
    """

    guarded: bool = False
    set_by_functions: frozenset[str] = frozenset()
    set_by_main: frozenset[str] = frozenset()
    used: frozenset[str] = frozenset()


@functools.cache
def _read(file: Path) -> _Read:
    try:
        text = file.read_text(encoding="utf-8")
        body, table = ast.parse(text).body, symtable.symtable(text, str(file), "exec")
    except (OSError, SyntaxError, ValueError):
        return _Read()
    tests = [(each, ast.dump(each.test)) for each in body if isinstance(each, ast.If)]
    guards = [each for each, test in tests if "__name__" in test and "__main__" in test]
    symbols = [symbol for scope in _within(table) for symbol in scope.get_symbols()]
    return _Read(
        bool(guards),
        frozenset(each.get_name() for each in symbols if each.is_declared_global() and each.is_assigned()),
        frozenset(name for guard in guards for name in _bound(guard)),
        frozenset(each.get_name() for each in symbols if each.is_global()),
    )


def _within(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    """Yield every function and class of a file, however deep."""
    for child in table.get_children():
        yield child
        yield from _within(child)


def _bound(block: ast.If) -> Iterator[str]:
    """Return the names that a block of a module binds, which are the module's globals."""
    # As a module of its own, so that its symbols are this block's alone.
    table = symtable.symtable("\n".join(map(ast.unparse, block.body)), "", "exec")
    return (each.get_name() for each in table.get_symbols() if each.is_assigned() or each.is_imported())


class _Sink:
    """A pickler's file, which keeps nothing of what is written but the modules and the names that it says."""

    def __init__(self) -> None:
        self.named: set[tuple[str, str]] = set()

    def write(self, data: Any) -> int:
        for module, name in _NAMED.findall(data):
            self.named.add((module.decode(), name.decode()))
        return len(data)
