"""Workers from a server that has used no Metal: multiprocessing's "forkserver", made as cheap as a plain fork.

The server is a process of its own, started once. It imports what the workers need and forks each of them; "spawn", as
safe, has every worker import torch, transformers and the script's other libraries, at the begin of every epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any

from hf_mps.layer.guards.platform.picklability import whose
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
        import torch

        processes: Any = torch.multiprocessing
        return cls(dict(os.environ), torch.get_default_dtype(), processes.get_sharing_strategy())

    def put(self) -> None:
        """Let this process have it."""
        import torch

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
    """The installed modules among `names`, and those that the others, the user's own, took something from.

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
    """The name of the module that a module's global comes from."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return name if isinstance(name, str) else None


@contextmanager
def _verdict_handed_down() -> Iterator[None]:
    """Let what is started in here have this process's verdict on Metal: libraries ask for it when imported.

    To answer them itself the server would create the device, and fork workers from a process that has it.
    """
    before = os.environ.get(probe.HANDED_DOWN)
    probe.hand_down(machine.present(), metal())
    try:
        yield
    finally:
        if before is None:
            del os.environ[probe.HANDED_DOWN]
        else:
            os.environ[probe.HANDED_DOWN] = before
