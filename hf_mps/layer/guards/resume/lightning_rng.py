"""lightning-rng: Lightning's checkpoints carry the random numbers, so that a resumed run is the unbroken one."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.patching import LIGHTNING, Patch, in_lightning
from hf_mps.layer.guards.base import Guard

if TYPE_CHECKING:
    from hf_mps.layer.guards.resume.loader_state import LoaderState

KEY, LOADERS = "hf_mps_random_states", "hf_mps_loaders"


class LightningRng(Guard):
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
    patches = {
        **in_lightning(
            {
                "trainer.connectors.checkpoint_connector:_CheckpointConnector.dump_checkpoint": "_dump",
                "trainer.connectors.checkpoint_connector:_CheckpointConnector.restore_training_state": "_restore",
                "loops.fetchers:_DataFetcher.setup": "_epoch",
            }
        ),
        "torch.utils.data:DataLoader.__iter__": Patch(
            "_begun", after=tuple(f"{package}.loops.fetchers" for package in LIGHTNING)
        ),
    }

    def __init__(self) -> None:
        super().__init__()
        self._saves = False
        self._waiting: list[LoaderState | None] = []  # of a checkpoint that was read, for the loaders of its epoch

    def applies(self) -> Choice[bool]:
        """Whether Lightning's function that makes a checkpoint names no random state."""
        if self._saves:
            return Choice(False, "this Lightning saves random states itself")
        return Choice(True, "dump_checkpoint of this Lightning saves no random state")

    def concerns(self, module: ModuleType) -> bool:
        """Whether Lightning's checkpoints hold no random states."""
        connector = getattr(module, "_CheckpointConnector", None)
        if connector is not None:
            self._saves = any("rng" in word for word in connector.dump_checkpoint.__code__.co_names)
        return connector is None or not self._saves

    def _epoch(self, stock: Any, fetcher: Any, combined_loader: Any) -> None:
        from torch.utils.data import DataLoader

        from hf_mps.layer.guards.resume import loader_state

        stock(fetcher, combined_loader)
        waiting, self._waiting = self._waiting, []
        loaders = [each for each in combined_loader.flattened if type(each) is DataLoader]
        for number, loader in enumerate(loaders):
            loader_state.notes(loader).replay = waiting[number] if len(waiting) == len(loaders) else None

    def _begun(self, stock: Any, loader: Any) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        return loader_state.begin(stock, loader)

    def _dump(self, stock: Any, connector: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_mps.layer.guards.resume.rng_state import States

        checkpoint = stock(connector, *args, **kwargs)
        if _on_metal(connector) and "optimizer_states" in checkpoint:  # one of weights alone resumes nothing
            # Into the checkpoint that Lightning makes; one that was read keeps them, and Lightning reads past them.
            checkpoint[KEY] = States.now(mps=True).plain()
            checkpoint[LOADERS] = [replay and replay.store() for replay in _places(connector.trainer)]
            self.acted(f"checkpoints also hold the random states, as {KEY}", aloud=False)
        return checkpoint

    def _restore(self, stock: Any, connector: Any) -> None:
        from hf_mps.layer.guards.resume.loader_state import LoaderState
        from hf_mps.layer.guards.resume.rng_state import States

        stock(connector)
        checkpoint = connector._loaded_checkpoint
        if not checkpoint or not _on_metal(connector) or connector.trainer.state.fn != "fit":
            return
        if KEY in checkpoint:
            States.of(checkpoint[KEY]).put()
            self._waiting = [stored and LoaderState.of(stored) for stored in checkpoint.get(LOADERS, [])]
        else:
            self.acted("the checkpoint holds no random states: the resumed run draws others than an unbroken one")


def _places(trainer: Any) -> list[LoaderState | None]:
    """Where the loaders of an epoch that is not at its end are."""
    from torch.utils.data import DataLoader

    from hf_mps.layer.guards.resume import loader_state

    loop = trainer.fit_loop
    done = loop.epoch_loop.batch_progress.current.ready
    if loop._combined_loader is None or not 0 < done < loop.max_batches:
        return []
    return [loader_state.capture(each, done) for each in loop._combined_loader.flattened if type(each) is DataLoader]


def _on_metal(connector: Any) -> bool:
    return str(connector.trainer.strategy.root_device).partition(":")[0] == "mps"


GUARD = LightningRng()
