"""resume-batches: the rest of a resumed epoch has the rows, and the draws of a collator, of the unbroken run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.guards.base import Guard

if TYPE_CHECKING:
    from hf_mps.layer.guards.resume.loader_state import LoaderState

FILE = "loader_rng.pth"
_REPLAY = "_hf_mps_replay"


class ResumeBatches(Guard):
    """Writes where the loader is into a file of its own, and lets the loader begin there again."""

    name = "resume-batches"
    what = (
        "a checkpoint within an epoch forgets the epoch's order of rows and what the collator drew for the batch that"
        " is made ahead, so a resumed run trains on other batches"
    )
    issue = "https://github.com/huggingface/transformers/issues/39215"
    until = "accelerate stores the state that an epoch began with, and Trainer restores it before the first batch"
    patches = {
        "accelerate.data_loader:DataLoaderShard.__iter__": "_epoch",
        "accelerate.data_loader:DataLoaderDispatcher.__iter__": "_epoch",
        "torch.utils.data:DataLoader.__iter__": Patch("_begun", after="accelerate.data_loader"),
        "accelerate.data_loader:skip_first_batches": "_skipped",
        "accelerate.accelerator:save_accelerator_state": "_accelerator_saves",
        "accelerate.accelerator:load_accelerator_state": "_accelerator_loads",
        "transformers.trainer:Trainer._save_rng_state": "_trainer_saves",
        "transformers.trainer:Trainer._load_from_checkpoint": "_trainer_loads",
        "transformers.trainer:Trainer._load_rng_state": "_trainer_synchronizes",
    }

    def __init__(self) -> None:
        super().__init__()
        self._waiting: LoaderState | None = None  # of a Trainer that has read its checkpoint and not yet skipped

    def applies(self) -> Choice[bool]:
        """Whether prepared loaders are generators that make one batch ahead, as all so far are."""
        return Choice(True, "accelerate makes one batch ahead, and no checkpoint keeps what that was drawn from")

    def _epoch(self, stock: Callable[..., Iterator[Any]], loader: Any) -> Iterator[Any]:
        from hf_mps.layer.guards.resume import loader_state

        if loader_state.exact():
            loader_state.share(loader)
        return stock(loader)

    def _begun(self, stock: OriginalCall, base: Any) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        return loader_state.begin(stock, base)

    def _skipped(self, stock: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        rest = stock(dataloader, num_batches)
        if hasattr(rest, "base_dataloader"):
            loader_state.link(rest, dataloader, num_batches)
            if self._waiting is not None:
                loader_state.notes(rest).replay, self._waiting = self._waiting, None
        return rest

    def _trainer_saves(self, stock: Callable[..., None], trainer: Any, output_dir: str) -> None:
        stock(trainer, output_dir)
        self._waiting = None  # ignore_data_skip: nothing was skipped
        self._save(Path(output_dir), [])

    def _trainer_loads(
        self, stock: Callable[..., Any], trainer: Any, checkpoint: str, *rest: Any, **kwargs: Any
    ) -> Any:
        from hf_mps.layer.guards.resume.loader_state import LoaderState

        loaded = stock(trainer, checkpoint, *rest, **kwargs)
        stored = _read(Path(checkpoint))
        self._waiting = LoaderState.of(stored["active"]) if stored and stored["active"] else None
        trainer.__dict__[_REPLAY] = self._waiting
        return loaded

    def _trainer_synchronizes(self, stock: Callable[..., None], trainer: Any, checkpoint: str | None) -> None:
        from hf_mps.layer.guards.resume.rng_state import States

        replay: LoaderState | None = trainer.__dict__.pop(_REPLAY, None)
        kept = States.now() if replay is not None and replay.done else None
        stock(trainer, checkpoint)
        if kept is not None:  # Trainer restores when its first batches are there, and more may have been drawn since
            kept.put()

    def _accelerator_saves(self, stock: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        saved = stock(folder, *args, **kwargs)
        self._save(Path(folder), loader_state.loaders_among(args, kwargs))
        return saved

    def _accelerator_loads(self, stock: Callable[..., Any], folder: Any, *args: Any, **kwargs: Any) -> Any:
        from hf_mps.layer.guards.resume import loader_state

        loaded = stock(folder, *args, **kwargs)
        stored, loaders = _read(Path(folder)), loader_state.loaders_among(args, kwargs)
        if stored is None or len(stored["generators"]) != len(loaders):  # of another program
            return loaded
        for loader, state in zip(loaders, stored["generators"], strict=True):
            loader_state.notes(loader).replay = None
            own = loader_state.generator(loader.base_dataloader)
            if state is not None and own is not None:  # a seeded sampler makes its own when it begins
                own.set_state(state)
        if stored["active"] and stored["loader"] is not None:
            loader_state.notes(loaders[stored["loader"]]).replay = loader_state.LoaderState.of(stored["active"])
        return loaded

    def _save(self, folder: Path, loaders: list[Any]) -> None:
        from hf_mps.layer.guards.resume import loader_state, rng_state

        active = loader_state.active()
        replay = None if active is None or active.end_of_dataloader else loader_state.capture(active)
        generators = [loader_state.generator(loader.base_dataloader) for loader in loaders]
        stored = {
            "loader": None if replay is None else _number(loader_state.source_of(active), loaders),
            "active": None if replay is None else replay.store(),
            "generators": [None if each is None else each.get_state() for each in generators],
        }
        rng_state.save(stored, rng_state.own(folder / FILE))
        self.acted(f"checkpoints also hold where the loader is in its epoch, in {FILE}", aloud=False)


def _number(loader: Any, loaders: list[Any]) -> int | None:
    return next((number for number, each in enumerate(loaders) if each is loader), None)


def _read(folder: Path) -> dict[str, Any] | None:
    import torch

    from hf_mps.layer.guards.resume import rng_state

    file = rng_state.own(folder / FILE)
    return torch.load(file, weights_only=True, map_location="cpu") if file.is_file() else None


GUARD = ResumeBatches()
