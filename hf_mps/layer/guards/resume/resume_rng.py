"""Guards of the random numbers of a training that is resumed.

resume-rng: checkpoints of Trainer and Accelerate carry the device's random numbers.
lightning-rng: Lightning's checkpoints carry the random numbers: a resumed run is the unbroken one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hf_mps.core.patching import LIGHTNING, Patch, in_lightning
from hf_mps.layer.guards.base import LibraryGuard, names_in, then
from hf_mps.layer.guards.resume import batches
from hf_mps.layer.guards.resume.batches import LoaderState
from hf_mps.layer.guards.resume.random_numbers import States, own, save

FILE = "mps_rng_state.pth"


class ResumeRng(LibraryGuard):
    """Writes its own file beside theirs, and reads it where they read theirs."""

    name = "resume-rng"
    what = "checkpoints leave out the device's random numbers, so a resumed run draws others for its dropout"
    issue = "transformers/trainer.py _save_rng_state, accelerate/checkpointing.py save_accelerator_state"
    until = "the oldest supported transformers and accelerate save torch.mps.get_rng_state()"
    faulty = "{} leave the mps generator out of their checkpoints"
    cured = "{} save the mps generator themselves"
    patches = {
        "transformers.trainer:Trainer._save_rng_state": then("_of_trainer", "_save"),
        "transformers.trainer:Trainer._load_rng_state": then("_of_trainer", "_load"),
        "accelerate.accelerator:save_accelerator_state": then("_of_accelerator", "_save"),
        "accelerate.accelerator:load_accelerator_state": then("_of_accelerator", "_load"),
    }

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether the library's function that saves random states names one of mps."""
        saving = module.Trainer._save_rng_state if hasattr(module, "Trainer") else module.save_accelerator_state
        return any("mps" in word for word in names_in(saving))

    def _of_trainer(self, way: str, trainer: Any, folder: str | None) -> None:
        if folder is not None and trainer.args.device.type == "mps":
            getattr(self, way)(Path(folder))

    def _of_accelerator(self, way: str, folder: Any, *_: Any, **__: Any) -> None:
        if batches.on_metal():
            getattr(self, way)(Path(folder))

    def _save(self, folder: Path) -> None:
        save(torch.mps.get_rng_state(), own(folder / FILE))
        self.acted(f"checkpoints also hold the device's random numbers, in {FILE}", aloud=False)

    def _load(self, folder: Path) -> None:
        file = own(folder / FILE)
        if file.is_file():
            torch.mps.set_rng_state(torch.load(file, weights_only=True, map_location="cpu"))
        else:
            self.acted(
                f"{folder} holds no {file.name}: the resumed run draws other random numbers than an unbroken one"
            )


KEY, LOADERS = "hf_mps_random_states", "hf_mps_loaders"


class LightningRng(LibraryGuard):
    """Puts the states of the device, of torch, NumPy and Python into the checkpoint's dictionary, and takes them out.

    Also where the loaders are in their epoch, which Lightning begins anew unless they keep their own place.
    """

    name = "lightning-rng"
    what = (
        "Lightning's checkpoints hold no random states and no place in an epoch, so a resumed run shuffles and drops"
        " otherwise, and sees other rows"
    )
    issue = "https://github.com/Lightning-AI/pytorch-lightning/issues/17543"
    until = "Lightning saves the random states, those of mps too"
    faulty = "dump_checkpoint of this Lightning saves no random state"
    cured = "this Lightning saves random states itself"
    patches = {
        **in_lightning(
            {
                "trainer.connectors.checkpoint_connector:_CheckpointConnector.dump_checkpoint": "_dump",
                "trainer.connectors.checkpoint_connector:_CheckpointConnector.restore_training_state": then("_restore"),
                "loops.fetchers:_DataFetcher.setup": then("_epoch"),
            }
        ),
        "torch.utils.data:DataLoader.__iter__": Patch(
            batches.begin, after=tuple(f"{package}.loops.fetchers" for package in LIGHTNING)
        ),
    }

    _waiting: Sequence[LoaderState | None] = ()  # of a checkpoint that was read, for the loaders of its epoch

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether Lightning's function that makes a checkpoint names a random state."""
        connector = getattr(module, "_CheckpointConnector", None)
        return connector and any("rng" in word for word in connector.dump_checkpoint.__code__.co_names)

    def _epoch(self, fetcher: Any, combined_loader: Any) -> None:
        from torch.utils.data import DataLoader

        waiting, self._waiting = self._waiting, ()
        loaders = [each for each in combined_loader.flattened if type(each) is DataLoader]
        for number, loader in enumerate(loaders):
            batches.notes(loader).replay = waiting[number] if len(waiting) == len(loaders) else None

    def _dump(self, stock: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = stock(connector, *args, **kwargs)
        # A checkpoint of weights alone resumes nothing.
        if _on_metal(connector) and "optimizer_states" in checkpoint:
            # Into the checkpoint that Lightning makes; one that was read keeps them, and Lightning reads past them.
            checkpoint[KEY] = States.now(mps=True).plain()
            checkpoint[LOADERS] = [replay and replay.store() for replay in _places(connector.trainer)]
            self.acted(f"checkpoints also hold the random states, as {KEY}", aloud=False)
        return checkpoint

    def _restore(self, connector: Any) -> None:
        checkpoint = connector._loaded_checkpoint
        if not checkpoint or not _on_metal(connector) or connector.trainer.state.fn != "fit":
            return
        if KEY in checkpoint:
            States.of(checkpoint[KEY]).put()
            self._waiting = [stored and LoaderState.of(stored) for stored in checkpoint.get(LOADERS, [])]
        else:
            self.acted("the checkpoint holds no random states: the resumed run draws others than an unbroken one")


def _places(trainer: Any) -> list[LoaderState | None]:
    """Return where the loaders of an epoch that is not at its end are."""
    from torch.utils.data import DataLoader

    loop = trainer.fit_loop
    done = loop.epoch_loop.batch_progress.current.ready
    if loop._combined_loader is None or not 0 < done < loop.max_batches:
        return []
    return [batches.capture(each, done) for each in loop._combined_loader.flattened if type(each) is DataLoader]


def _on_metal(connector: Any) -> bool:
    return str(connector.trainer.strategy.root_device).partition(":")[0] == "mps"
