"""fork-workers: a loader's workers are started anew instead of forked from a process that uses Metal."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from weakref import WeakSet

from hf_mps.choice import Choice
from hf_mps.guards.guard import Guard, around
from hf_mps.guards.said import remember, said

ARGUMENT = "dataloader_multiprocessing_context"
"""Of TrainingArguments since transformers 5.15; before, Trainer says fork to its loaders and nobody can object."""


class ForkWorkers(Guard):
    """Looks at a loader when it is about to start its workers.

    Python starts processes anew ("spawn") on a Mac; Trainer asks for "fork" there, because a collator that holds a
    model on the device cannot be sent to a new process. Where everything can be sent, it is.
    """

    name = "fork-workers"
    what = "workers forked from a process that uses Metal can hang or crash; Trainer forks them by default on mps"
    issue = "https://github.com/pytorch/pytorch/pull/178037"
    until = "the oldest supported transformers does not fork on mps by default"

    def __init__(self) -> None:
        super().__init__()
        self._trainers_own = False  # while Trainer makes a loader, and its start method is its own idea
        self._asked: WeakSet[Any] = WeakSet()  # loaders whose start method the user gave

    def applies(self) -> Choice[bool]:
        """Whether this process uses Metal, and its Python or its transformers would fork."""
        import torch

        from hf_mps.device.choice import metal

        if not metal().value:
            return Choice(False, metal().reason)
        if torch.mps.driver_allocated_memory() == 0:
            return Choice(False, "nothing was put on the device yet, a fork does no harm")
        return Choice(True, "the device is in use, and torch has no way to use it on after a fork")

    def verdict(self) -> Choice[bool]:
        """Ask anew each time: a process uses Metal from some moment on."""
        return self.applies()

    def install(self, module: ModuleType) -> None:
        """Put it around the start of workers; note what users say to TrainingArguments and DataLoader."""
        if module.__name__ == "torch":
            from torch.utils.data import DataLoader

            around(self, DataLoader, "__init__", self._loader_made)
            around(self, DataLoader, "_get_iterator", self._workers_start)
        else:
            remember(module.TrainingArguments)
            around(self, module.Trainer, "_get_dataloader", self._trainer_makes)

    def _trainer_makes(self, stock: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        self._trainers_own = not said(trainer.args, ARGUMENT)
        try:
            return stock(trainer, *args, **kwargs)  # accelerate makes its own loader of Trainer's inside
        finally:
            self._trainers_own = False

    def _loader_made(self, stock: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        stock(loader, *args, **kwargs)
        if kwargs.get("multiprocessing_context") is not None and not self._trainers_own:
            self._asked.add(loader)

    def _workers_start(self, stock: Any, loader: Any) -> Any:
        if loader.num_workers == 0 or _start_method(loader) != "fork" or not self.needed or not self._can_send(loader):
            return stock(loader)
        self.acted(
            "a loader's workers are started anew (spawn) and not forked from a process that uses Metal", aloud=False
        )
        given = loader.multiprocessing_context
        loader.multiprocessing_context = "spawn"
        try:
            return stock(loader)
        finally:
            loader.multiprocessing_context = given

    def _can_send(self, loader: Any) -> bool:
        """Whether the loader's workers can be started anew; says why not, as a fork may hang."""
        if loader in self._asked:
            self.acted("workers are forked from a process that uses Metal, as multiprocessing_context asks for")
            return False
        obstacle = _cannot_be_sent(loader)
        if obstacle:
            self.acted(
                f"workers are forked from a process that uses Metal, where they can hang, because {obstacle}; "
                f"next: num_workers=0 if they do"
            )
        return not obstacle


def _start_method(loader: Any) -> str:
    import multiprocessing

    context = loader.multiprocessing_context
    if context is not None:
        return str(context.get_start_method())
    # Asked without allow_none it would settle the default, and a later set_start_method of the script would fail.
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _cannot_be_sent(loader: Any) -> str:
    """Why a new process could not be given the loader's work, or an empty string."""
    from multiprocessing.reduction import ForkingPickler

    main: Any = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    # A package's own __main__ (python -m pytest) is not run again: multiprocessing/spawn.py, _fixup_main_from_name.
    package = getattr(getattr(main, "__spec__", None), "name", "").endswith("__main__")
    if file is not None and not package and not _guarded(Path(file)):
        return f'{Path(file).name} has no `if __name__ == "__main__":`, without which a new process runs it all again'
    sink = _Sink()
    for what in ("dataset", "collate_fn", "worker_init_fn"):
        try:
            ForkingPickler(sink, 2).dump(getattr(loader, what))
        except Exception as error:
            return f"the loader's {what} cannot be sent to a new process ({str(error).splitlines()[0]})"
    if file is None and sink.names_main:
        return "the loader uses what a notebook or a prompt defined, which a new process does not know"
    return ""


def _guarded(file: Path) -> bool:
    """Whether a script's outermost lines do nothing in a process that imports it under another name."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError):
        return False
    return any(
        isinstance(each, ast.If) and "__name__" in ast.dump(each.test) and "__main__" in ast.dump(each.test)
        for each in body
    )


class _Sink(io.RawIOBase):
    """A file that keeps nothing of what is written, but whether it names the module __main__."""

    names_main = False

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.names_main = self.names_main or b"__main__" in bytes(data)
        return len(data)


GUARD = ForkWorkers()
