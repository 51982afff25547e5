"""pin-memory: Trainer's loaders do not ask for pinned memory, which Metal has no use for and PyTorch warns of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Patch, Put
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.explicit_args import TARGET, track, was_given
from hf_mps.layer.guards.introspect import names_in


class PinMemory(Guard):
    """Hides Trainer's default from torch while a loader of Trainer's begins an epoch; who gave it gets the warning.

    Neither TrainingArguments nor the loader is changed: torch pins nothing on mps, whatever both of them say.
    """

    name = "pin-memory"
    what = "dataloader_pin_memory is on by default, and PyTorch warns at each loader that it does nothing on mps"
    issue = "https://github.com/pytorch/pytorch/blob/main/torch/utils/data/dataloader.py (pin_memory)"
    until = "PyTorch pins memory for mps, or no longer warns, in the oldest supported version"
    patches = {
        TARGET: Put(track),
        "transformers.trainer:Trainer._get_dataloader": "_trainer_makes",
        "torch.utils.data:DataLoader.__init__": Patch("_loader_made", after="transformers.trainer"),
        "torch.utils.data:DataLoader._get_iterator": Patch("_epoch_begins", after="transformers.trainer"),
    }

    def __init__(self) -> None:
        super().__init__()
        self._trainers_own = False  # while Trainer makes a loader, by a default of its own
        self._loaders: WeakSet[Any] = WeakSet()

    def applies(self) -> Choice[bool]:
        """Whether what begins a loader's epoch names mps; read, because a loader that is tried draws a seed."""
        from torch.utils.data.dataloader import _BaseDataLoaderIter

        if "mps" in names_in(_BaseDataLoaderIter.__init__):
            return Choice(True, "a loader of this torch that is to pin memory warns that mps does not support it")
        return Choice(False, "loaders of this torch do not warn of mps")

    def _trainer_makes(self, stock: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = trainer.args
        asked = was_given(arguments, "dataloader_pin_memory")
        self._trainers_own = arguments.dataloader_pin_memory and arguments.device.type == "mps" and not asked
        try:
            return stock(trainer, *args, **kwargs)  # accelerate makes its own loader of Trainer's inside
        finally:
            self._trainers_own = False

    def _loader_made(self, stock: Callable[..., None], loader: Any, *args: Any, **kwargs: Any) -> None:
        stock(loader, *args, **kwargs)
        if self._trainers_own and loader.pin_memory:
            self._loaders.add(loader)

    def _epoch_begins(self, stock: Callable[..., Any], loader: Any) -> Any:
        if loader not in self._loaders or not loader.pin_memory or not self.needed:
            return stock(loader)
        self.acted("nothing is pinned for Trainer's loaders: CPU and GPU share their memory", aloud=False)
        loader.pin_memory = False  # what torch reads and warns of; it pins nothing on mps either way
        try:
            return stock(loader)
        finally:
            loader.pin_memory = True


GUARD = PinMemory()
