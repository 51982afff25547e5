"""Guards of the batches with which a resumed training goes on.

Where a loader that Accelerate prepared is in its epoch, told by random numbers: what an epoch's rest is made from.
resume-epoch: a loader that goes on knows its epoch, and a seeded sampler repeats no order.
resume-batches: the rest of a resumed epoch has the rows, and a collator's draws, of the unbroken run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from hf_mps.core.files import write_json
from hf_mps.core.patching import OriginalCall, Patch
from hf_mps.layer.guards.base import Guard, LibraryGuard, first, names_in, then
from hf_mps.layer.guards.resume import in_recipe, random_numbers
from hf_mps.layer.guards.resume.random_numbers import States

_NOTES = "_hf_mps_notes"


@dataclass
class LoaderPosition:
    """An epoch of a loader: the states when it began and before its latest batch, and how many were made so far."""

    begun: States
    before: States | None
    made: int


@dataclass
class LoaderState:
    """A place that was stored: the number of the batch that was made ahead, and the states around it.

    The number is None where no batch was, or workers made it.
    """

    number: int | None
    begun: States
    before: States | None
    after: States
    skip: int = 0
    """How many batches are to be left out first, where nobody else leaves them out."""
    done: bool = False

    def store(self) -> dict[str, Any]:
        """In types that torch.load reads with weights_only."""
        states = {"begun": self.begun, "before": self.before, "after": self.after}
        return {"number": self.number, "skip": self.skip, **{at: each and each.plain() for at, each in states.items()}}

    @classmethod
    def of(cls, stored: dict[str, Any]) -> LoaderState:
        """From what `store` made."""
        before = None if stored["before"] is None else States.of(stored["before"])
        return cls(stored["number"], States.of(stored["begun"]), before, States.of(stored["after"]), stored["skip"])


@dataclass
class LoaderNotes:
    """What is known of a prepared loader, shared with its base."""

    source: Any = None
    """The loader that this one is the rest of, by skip_first_batches."""
    skipped: int = 0
    """Batches of that one's epoch which this one leaves out."""
    place: LoaderPosition | None = None
    replay: LoaderState | None = None
    """Where its next epoch is to go on from."""


def notes(loader: Any) -> LoaderNotes:
    """Return the notes of a prepared loader."""
    found: LoaderNotes = loader.__dict__.setdefault(_NOTES, LoaderNotes())
    return found


def link(rest: Any, source: Any, skipped: int) -> None:
    """Note that `rest` is what skip_first_batches left of `source`, and hand on where it is to go on from."""
    if notes(rest).source is not None:
        return
    of = notes(source)
    # Of a stream the batches are made and thrown away: none is left out.
    left_out = skipped - getattr(rest, "skip_batches", 0)
    rest.__dict__[_NOTES] = LoaderNotes(source_of(source), of.skipped + left_out, replay=of.replay)
    of.replay = None


def on_metal() -> bool:
    """Return whether Accelerate put this process on the device mps."""
    from accelerate.state import PartialState

    return bool(PartialState().device.type == "mps")


def active() -> Any:
    """Return the innermost prepared loader in whose loop the process is, or None."""
    from accelerate.state import GradientState

    return GradientState().active_dataloader


def loaders_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The loaders among what save_accelerator_state and load_accelerator_state are called with after the folder."""
    found: list[Any] = kwargs["dataloaders"] if "dataloaders" in kwargs else args[3]
    return found


def source_of(loader: Any) -> Any:
    """Return the prepared loader that a loader is the rest of, or itself."""
    found = notes(loader).source
    return loader if found is None else found


class _Watched(_SingleProcessDataLoaderIter):
    """A base loader's iterator that keeps its place; none is made, an iterator becomes one."""

    place: LoaderPosition
    replay: LoaderState | None

    @classmethod
    def become(cls, iterator: Any, place: LoaderPosition, replay: LoaderState | None) -> None:
        """Turn a plain iterator into one that keeps its place."""
        # In place: the loader and the caller's loop hold the object already.
        iterator.__class__ = cls
        iterator.place, iterator.replay = place, replay

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
        # The batch that was made ahead is drawn again from what it was drawn from.
        if self.replay is not None and self.replay.number == self.place.made and self.replay.before is not None:
            self.replay.before.put()
        self.place.before = States.now()
        self.place.made += 1
        return index

    def _next_data(self) -> Any:
        data = super()._next_data()  # type: ignore[no-untyped-call]
        if self.replay is not None and self.replay.number == self.place.made - 1:
            self.replay.after.put()
            self.replay.done, self.replay = True, None
        return data

    def leave_out(self) -> None:
        """Go past a batch; of rows that can be addressed none is made."""
        # A dataset that is only iterated over moves on by reading.
        if self._dataset_kind == _DatasetKind.Map:
            self._next_index()
        else:
            self._next_data()


def begin(stock: OriginalCall, base: Any) -> Any:
    """Return the iterator of a base loader; that of one with notes keeps its place from now on.

    Workers draw from generators of their own: of their batches only the order of rows is kept.
    """
    # They are not there meanwhile, as two guards are put around __iter__.
    of: LoaderNotes | None = base.__dict__.pop(_NOTES, None)
    if of is None:
        return stock(base)
    try:
        replay, of.replay = of.replay, None
        if replay is not None and replay.number is not None and replay.number < of.skipped:
            replay = None  # the script goes on from elsewhere
        own = generator(base)
        if replay is not None:
            replay.begun.put(own)
        of.place = LoaderPosition(States.now(generator=own), None, of.skipped)
        iterator = stock(base)
        # Of exactly this class: another one's iterator would lose its own methods.
        watched = type(iterator) is _SingleProcessDataLoaderIter
        if watched:
            _Watched.become(iterator, of.place, replay)
        if replay is None:
            return iterator
        for _ in range(replay.skip):
            stock.foreign(iterator.leave_out if watched else iterator.__next__)
        if replay.number is None or not watched:
            replay.after.put()
            replay.done = True
        return iterator
    finally:
        base.__dict__[_NOTES] = of


def capture(loader: Any, trained_on: int | None = None) -> LoaderState | None:
    """Return where a loader that a step was just taken from is, to be stored; None where that is not known.

    `trained_on` counts the batches that steps were taken on, where nobody else leaves them out of a resumed epoch; one
    more may have been made. Without it one more was, as Accelerate's loaders make it.
    """
    place = notes(loader).place
    if place is None:
        return None
    skip, ahead = trained_on or 0, trained_on is None or place.made > trained_on
    number = place.made - 1 if ahead and place.before is not None else None
    return LoaderState(number, place.begun, place.before, States.now(), skip)


def generator(loader: Any) -> Any:
    """Return the generator that a user gave to a base loader or to its sampler."""
    if loader.generator is not None:
        return loader.generator
    sampler: Any = loader.batch_sampler
    while getattr(sampler, "batch_sampler", None) is not None:  # of a rest, or of several processes
        sampler = sampler.batch_sampler
    return getattr(getattr(sampler, "sampler", loader.sampler), "generator", None)


EPOCH_FILE = "loader_epochs.json"


class ResumeEpoch(LibraryGuard):
    """Keeps each loader's count of epochs in its own file, hands it to a rest and back, whatever the device."""

    name = "resume-epoch"
    what = (
        "checkpoints of Accelerate forget how many epochs each loader has done, and so does what skip_first_batches"
        " leaves of one: a seeded sampler repeats an order of rows"
    )
    issue = "https://github.com/huggingface/accelerate/issues/3996"
    until = "the oldest supported accelerate stores the loaders' iteration, and hands it on and back"
    faulty = "checkpoints of this accelerate do not say how many epochs a loader has done"
    cured = "this accelerate stores how many epochs each loader has done"
    patches = {
        # Before others import it by name.
        "accelerate.data_loader:skip_first_batches": "_skipped",
        "accelerate.data_loader:DataLoaderShard.__iter__": "_epoch",
        "accelerate.data_loader:DataLoaderDispatcher.__iter__": "_epoch",
        "accelerate.accelerator:save_accelerator_state": then("_saved"),
        "accelerate.accelerator:load_accelerator_state": then("_loaded"),
    }

    def is_cured(self, module: ModuleType) -> bool | None:
        """Return whether save_accelerator_state names the loader's count."""
        saving = getattr(module, "save_accelerator_state", None)  # accelerate's loaders always count anew
        return saving and "iteration" in names_in(saving)

    def _skipped(self, stock: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
        rest = stock(dataloader, num_batches)
        if hasattr(rest, "iteration") and hasattr(dataloader, "iteration"):
            link(rest, dataloader, num_batches)
            if rest.iteration != dataloader.iteration:  # accelerate before 1.15
                rest.iteration = dataloader.iteration
                self.acted("the rest of a resumed epoch has the order of rows of that epoch", aloud=False)
        return rest

    def _epoch(self, stock: Callable[..., Iterator[Any]], loader: Any) -> Iterator[Any]:
        yield from stock(loader)
        self.safely(self._count, loader)

    def _count(self, loader: Any) -> None:
        whole = source_of(loader)
        if whole.iteration < loader.iteration:
            whole.iteration = loader.iteration
            self.acted("the epoch after a resumed one has its own order of rows", aloud=False)

    def _saved(self, folder: Any, *args: Any, **kwargs: Any) -> None:
        write_json(Path(folder) / EPOCH_FILE, [_epochs(loader) for loader in loaders_among(args, kwargs)])
        self.acted(f"checkpoints also hold how many epochs each loader has done, in {EPOCH_FILE}", aloud=False)

    def _loaded(self, folder: Any, *args: Any, **kwargs: Any) -> None:
        file, loaders = Path(folder) / EPOCH_FILE, loaders_among(args, kwargs)
        counts = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []
        if len(counts) == len(loaders):  # else of another program
            for loader, count in zip(loaders, counts, strict=True):
                loader.iteration = count


def _epochs(loader: Any) -> int:
    """Return how many epochs a prepared loader has done; one whose last batch is being trained on counts."""
    current = active()
    if current is not None and source_of(current) is loader:
        return int(current.iteration) + bool(current.end_of_dataloader)
    return int(loader.iteration)


FILE = "loader_rng.pth"
_REPLAY = "_hf_mps_replay"


class ResumeBatches(Guard):
    """Writes where the loader is into its own file, and lets the loader begin there again."""

    name = "resume-batches"
    what = (
        "a checkpoint within an epoch forgets the epoch's order of rows and what the collator drew for the batch that"
        " is made ahead, so a resumed run trains on other batches"
    )
    issue = "https://github.com/huggingface/transformers/issues/39215"
    # Prepared loaders are generators that make one batch ahead, as all so far are.
    always = "accelerate makes one batch ahead, and no checkpoint keeps what that was drawn from"
    until = "accelerate stores the state that an epoch began with, and Trainer restores it before the first batch"
    patches = {
        "accelerate.data_loader:DataLoaderShard.__iter__": first("_epoch"),
        "accelerate.data_loader:DataLoaderDispatcher.__iter__": first("_epoch"),
        "torch.utils.data:DataLoader.__iter__": Patch(begin, after="accelerate.data_loader"),
        "accelerate.data_loader:skip_first_batches": "_skipped",
        "accelerate.accelerator:save_accelerator_state": then("_accelerator_saves"),
        "accelerate.accelerator:load_accelerator_state": then("_accelerator_loads"),
        "transformers.trainer:Trainer._save_rng_state": then("_trainer_saves"),
        "transformers.trainer:Trainer._load_from_checkpoint": then("_trainer_loads"),
        "transformers.trainer:Trainer._load_rng_state": "_trainer_synchronizes",
    }

    _waiting: LoaderState | None = None  # of a Trainer that has read its checkpoint and not yet skipped

    def _epoch(self, loader: Any) -> None:
        if in_recipe() or on_metal():
            # The base, which begins epochs, sees the notes of the prepared one.
            loader.base_dataloader.__dict__[_NOTES] = notes(loader)

    def _skipped(self, stock: Callable[..., Any], dataloader: Any, num_batches: int = 0) -> Any:
        rest = stock(dataloader, num_batches)
        if hasattr(rest, "base_dataloader"):
            link(rest, dataloader, num_batches)
            if self._waiting is not None:
                notes(rest).replay, self._waiting = self._waiting, None
        return rest

    def _trainer_saves(self, trainer: Any, output_dir: str) -> None:
        self._waiting = None  # ignore_data_skip: nothing was skipped
        self._save(Path(output_dir), [])

    def _trainer_loads(self, trainer: Any, checkpoint: str, *_: Any, **__: Any) -> None:
        stored = _read(Path(checkpoint))
        self._waiting = LoaderState.of(stored["active"]) if stored and stored["active"] else None
        trainer.__dict__[_REPLAY] = self._waiting

    def _trainer_synchronizes(self, stock: Callable[..., None], trainer: Any, checkpoint: str | None) -> None:
        replay: LoaderState | None = trainer.__dict__.pop(_REPLAY, None)
        kept = States.now() if replay is not None and replay.done else None
        stock(trainer, checkpoint)
        # Trainer restores when its first batches are there, and more may have been drawn since.
        if kept is not None:
            kept.put()

    def _accelerator_saves(self, folder: Any, *args: Any, **kwargs: Any) -> None:
        self._save(Path(folder), loaders_among(args, kwargs))

    def _accelerator_loads(self, folder: Any, *args: Any, **kwargs: Any) -> None:
        stored, loaders = _read(Path(folder)), loaders_among(args, kwargs)
        if stored is None or len(stored["generators"]) != len(loaders):  # of another program
            return
        for loader, state in zip(loaders, stored["generators"], strict=True):
            notes(loader).replay = None
            own = generator(loader.base_dataloader)
            if state is not None and own is not None:  # a seeded sampler makes its own when it begins
                own.set_state(state)
        if stored["active"] and stored["loader"] is not None:
            notes(loaders[stored["loader"]]).replay = LoaderState.of(stored["active"])

    def _save(self, folder: Path, loaders: list[Any]) -> None:
        current = active()
        whole = None if current is None else source_of(current)
        replay = None if current is None or current.end_of_dataloader else capture(current)
        generators = [generator(loader.base_dataloader) for loader in loaders]
        stored = {
            "loader": None if replay is None else next((n for n, each in enumerate(loaders) if each is whole), None),
            "active": None if replay is None else replay.store(),
            "generators": [None if each is None else each.get_state() for each in generators],
        }
        random_numbers.save(stored, random_numbers.own(folder / FILE))
        self.acted(f"checkpoints also hold where the loader is in its epoch, in {FILE}", aloud=False)


def _read(folder: Path) -> dict[str, Any] | None:
    file = random_numbers.own(folder / FILE)
    return torch.load(file, weights_only=True, map_location="cpu") if file.is_file() else None
