"""lightning-rng: Lightning's checkpoints carry the random numbers, so that a resumed run is the unbroken one."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

from hf_mps.choice import Choice
from hf_mps.guards.guard import Guard, around

KEY = "hf_mps_random_states"


class LightningRng(Guard):
    """Puts the states of the device, of torch, NumPy and Python into the checkpoint's dictionary, and takes them out.

    A checkpoint of the end of an epoch then resumes to the last bit. One of the middle does where its loader keeps its
    own place (torchdata's StatefulDataLoader): Lightning begins the epoch's batches anew otherwise.
    """

    name = "lightning-rng"
    what = "Lightning's checkpoints hold no random states, so a resumed run shuffles and drops otherwise"
    issue = "https://github.com/Lightning-AI/pytorch-lightning/issues/17543"
    until = "Lightning saves the random states, those of mps too"

    def __init__(self) -> None:
        super().__init__()
        self._saves = False

    def applies(self) -> Choice[bool]:
        """Whether Lightning's function that makes a checkpoint names no random state."""
        if self._saves:
            return Choice(False, "this Lightning saves random states itself")
        return Choice(True, "dump_checkpoint of this Lightning saves no random state")

    def install(self, module: ModuleType) -> None:
        """Put it around the making of a checkpoint and around what restores a training from one."""
        connector = module._CheckpointConnector
        self._saves = any("rng" in word for word in connector.dump_checkpoint.__code__.co_names)
        if not self._saves:
            around(self, connector, "dump_checkpoint", self._dump)
            around(self, connector, "restore_training_state", self._restore)

    def _dump(self, stock: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = stock(connector, *args, **kwargs)
        if _on_metal(connector) and "optimizer_states" in checkpoint:  # one of weights alone resumes nothing
            checkpoint[KEY] = states()
            self.acted(f"checkpoints also hold the random states, as {KEY}", aloud=False)
        return checkpoint

    def _restore(self, stock: Any, connector: Any) -> None:
        stock(connector)
        checkpoint = connector._loaded_checkpoint
        if not checkpoint or not _on_metal(connector) or connector.trainer.state.fn != "fit":
            return
        if KEY in checkpoint:
            restore(checkpoint[KEY])
        else:
            self.acted("the checkpoint holds no random states: the resumed run draws others than an unbroken one")


def states() -> dict[str, Any]:
    """The random states of Metal, torch, NumPy and Python, in types that torch.load reads with weights_only=True."""
    import numpy
    import torch

    kind, keys, place, has_gauss, gauss = numpy.random.get_state(legacy=True)
    return {
        "mps": torch.mps.get_rng_state(),
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), [int(key) for key in keys], int(place), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def restore(found: dict[str, Any]) -> None:
    """Draw on from `states`."""
    import numpy
    import torch

    torch.mps.set_rng_state(found["mps"].cpu())
    torch.set_rng_state(found["torch"].cpu())
    kind, keys, place, has_gauss, gauss = found["numpy"]
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, gauss))
    version, inner, next_gauss = found["python"]
    random.setstate((version, tuple(inner), next_gauss))


def _on_metal(connector: Any) -> bool:
    return str(connector.trainer.strategy.root_device).partition(":")[0] == "mps"


GUARD = LightningRng()
