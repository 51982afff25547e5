"""pin-memory: Trainer's loaders do not ask for pinned memory, which Metal has no use for and PyTorch warns of."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards.guard import Guard, around
from hf_mps.guards.said import remember, said


class PinMemory(Guard):
    """Switches Trainer's default off, unless the user gave dataloader_pin_memory."""

    name = "pin-memory"
    what = "dataloader_pin_memory is on by default, and PyTorch warns at each loader that it does nothing on mps"
    issue = "https://github.com/pytorch/pytorch/blob/main/torch/utils/data/dataloader.py (pin_memory)"
    until = "PyTorch pins memory for mps, or no longer warns, in the oldest supported version"

    def applies(self) -> Choice[bool]:
        """Whether a loader that is to pin memory warns on this device."""
        from torch.utils.data import DataLoader

        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            list(DataLoader([0], pin_memory=True))  # type: ignore[arg-type]
        if any("pin_memory" in str(each.message) for each in told):
            return Choice(True, "tried: a loader that is to pin memory warns that mps does not support it")
        return Choice(False, "tried: a loader that is to pin memory does not warn")

    def install(self, module: ModuleType) -> None:
        """Note what users say to TrainingArguments; put it around Trainer.__init__."""
        remember(module.TrainingArguments)
        if module.__name__ == "transformers.trainer":
            around(self, module.Trainer, "__init__", self._trainer_made)

    def _trainer_made(self, stock: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        stock(trainer, *args, **kwargs)
        arguments = trainer.args
        asked = said(arguments, "dataloader_pin_memory")
        if arguments.dataloader_pin_memory and arguments.device.type == "mps" and not asked and self.needed:
            arguments.dataloader_pin_memory = False
            self.acted("dataloader_pin_memory is off: CPU and GPU share their memory, there is nothing to pin")


GUARD = PinMemory()
