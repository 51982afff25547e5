"""Guards of data loaders.

fork-workers: Trainer's workers come from a process that has used no Metal.
pin-memory: Trainer's loaders do not ask for pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch
from weakref import WeakSet

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import OriginalCall, Patch, Put
from hf_mps.layer.guards.base import Guard, names_in, then
from hf_mps.layer.guards.explicit_args import TARGET, track, was_given
from hf_mps.metal.device import probe

STARTED = "_hf_mps_started"
# The public get_train_dataloader is overridden by TRL's trainers, which come here too.
MADE = {"transformers.trainer:Trainer._get_dataloader": "_trainer_makes"}


class TrainersLoaders(Guard):
    """A guard of the loaders to which Trainer gives an argument by its own default."""

    argument: str
    """The loader's; that of TrainingArguments begins with `dataloader_`."""

    def __init__(self) -> None:
        super().__init__()
        self._trainers_own = False  # while Trainer makes one
        self._loaders: WeakSet[Any] = WeakSet()

    def by_default(self, arguments: Any) -> bool:
        """Return whether Trainer, and not the user, chooses what these TrainingArguments say."""
        return not was_given(arguments, f"dataloader_{self.argument}")

    def _trainer_makes(self, stock: OriginalCall, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        with patch.object(self, "_trainers_own", self.by_default(trainer.args)):
            # accelerate makes its own loader of Trainer's in there, which is Trainer's too.
            return stock(trainer, *args, **kwargs)

    def _loader_made(self, loader: Any, *_: Any, **__: Any) -> None:
        if self._trainers_own and getattr(loader, self.argument):
            self._loaders.add(loader)


class ForkWorkers(TrainersLoaders):
    """Looks at a loader of Trainer's when it is about to start its workers.

    Python starts processes anew ("spawn") on a Mac, and plain loaders do; Trainer asks for "fork" there, because a
    collator that holds a model on the device cannot be sent to a new process. Where everything can be sent, it is, to
    processes that a server forks (hf_mps.layer.guards.platform.fork_server): they cost what a fork costs. Everything
    that a loader does with its workers is stock's, and so are the numbers that they draw.
    """

    name, argument = "fork-workers", "multiprocessing_context"  # of TrainingArguments since transformers 5.15
    what = "workers forked from a process that uses Metal can hang or crash; Trainer forks them by default on mps"
    issue = "https://github.com/pytorch/pytorch/pull/178037"
    until = "the oldest supported transformers does not fork on mps by default"
    patches = {
        "torch.utils.data:DataLoader.__init__": then("_loader_made"),
        "torch.utils.data:DataLoader.__iter__": "_workers_start",
        TARGET: Put(track),
        **MADE,
    }

    def applies(self) -> Choice[bool]:
        """Whether this process uses Metal, as far as anybody has asked for it; asks for nothing itself before."""
        known = probe.known()
        if known is None:
            return Choice(False, "nobody has asked for the device in this process, a fork does no harm")
        if not known.value:
            return known
        # Metal's own figure (driver_allocated_memory) may count the device itself.
        if torch.mps.current_allocated_memory() == 0:
            return Choice(False, "nothing was put on the device yet, a fork does no harm")
        return Choice(True, "the device is in use, and torch has no way to use it on after a fork")

    def verdict(self) -> Choice[bool]:
        """Ask anew each time: a process uses Metal from some moment on."""
        return self.applies()

    def _workers_start(self, stock: OriginalCall, loader: Any) -> Any:
        started = getattr(loader, STARTED, False)
        if loader.num_workers == 0 or started or not _forks(loader) or not self.needed:
            return stock(loader)
        # The next epochs have the same workers then.
        setattr(loader, STARTED, loader.persistent_workers)
        if loader not in self._loaders:
            self.acted("workers are forked from a process that uses Metal, as the script asks for")
            return stock(loader)
        from hf_mps.layer.guards.platform import fork_server

        work = fork_server.sent(loader)
        if work.obstacle:
            self.acted(
                f"workers are forked from a process that uses Metal, where they can hang, because {work.obstacle}; "
                f"next: num_workers=0 if they do"
            )
            return stock(loader)
        fork_server.start(work.modules)
        given = loader.multiprocessing_context
        try:
            loader.multiprocessing_context = fork_server.Workers()
            iterator = stock(loader)
        # The server has ended: a library would not be imported in it.
        except (OSError, EOFError):
            loader.multiprocessing_context = given
            return stock(loader)
        finally:
            loader.multiprocessing_context = given
        self.acted("Trainer's workers are forked from a process that has used no Metal (forkserver)", aloud=False)
        return iterator


def _forks(loader: Any) -> bool:
    """Return whether a loader's workers are to be forked because somebody says so.

    What a system's Python does where nobody does is no business of the guard: with Metal it is "spawn".
    """
    import multiprocessing

    context = loader.multiprocessing_context
    if context is not None:
        return bool(context.get_start_method() == "fork")
    # Asked without allow_none it would settle the default, and a later set_start_method of the script would fail.
    return multiprocessing.get_start_method(allow_none=True) == "fork" != multiprocessing.get_all_start_methods()[0]


class PinMemory(TrainersLoaders):
    """Hides Trainer's default from torch while a loader of Trainer's begins an epoch; who gave it gets the warning.

    Neither TrainingArguments nor the loader is changed: torch pins nothing on mps, whatever both of them say.
    """

    name, argument = "pin-memory", "pin_memory"
    what = "dataloader_pin_memory is on by default, and PyTorch warns at each loader that it does nothing on mps"
    issue = "https://github.com/pytorch/pytorch/blob/main/torch/utils/data/dataloader.py (pin_memory)"
    until = "PyTorch pins memory for mps, or no longer warns, in the oldest supported version"
    patches = {
        TARGET: Put(track),
        **MADE,
        "torch.utils.data:DataLoader.__init__": then("_loader_made", after="transformers.trainer"),
        "torch.utils.data:DataLoader.__iter__": Patch("_epoch_begins", after="transformers.trainer"),
    }

    def by_default(self, arguments: Any) -> bool:
        """The same, of a training on mps."""
        return super().by_default(arguments) and arguments.device.type == "mps"

    def applies(self) -> Choice[bool]:
        """Return whether what begins a loader's epoch names mps; read, because a loader that is tried draws a seed."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        if "mps" in names_in(_BaseDataLoaderIter.__init__):
            return Choice(True, "a loader of this torch that is to pin memory warns that mps does not support it")
        return Choice(False, "loaders of this torch do not warn of mps")

    def _epoch_begins(self, stock: Callable[..., Any], loader: Any) -> Any:
        if loader not in self._loaders or not loader.pin_memory or not self.needed:
            return stock(loader)
        self.acted("nothing is pinned for Trainer's loaders: CPU and GPU share their memory", aloud=False)
        # What torch reads and warns of; it pins nothing on mps either way.
        with patch.object(loader, "pin_memory", False):
            return stock(loader)
