"""Where a loader that Accelerate prepared is in its epoch, told by random numbers: what an epoch's rest is made from.

A loader's base makes one batch ahead of the step, so that what the collator drew for that batch lies before the random
state that a checkpoint keeps; and a shuffled order is drawn when an epoch begins. Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.resume import in_recipe
from hf_mps.layer.guards.resume.rng_state import States

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
        before = None if self.before is None else self.before.plain()
        states = {"begun": self.begun.plain(), "before": before, "after": self.after.plain()}
        return {"number": self.number, "skip": self.skip, **states}

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
    """Those of a prepared loader."""
    found: LoaderNotes = loader.__dict__.setdefault(_NOTES, LoaderNotes())
    return found


def share(loader: Any) -> None:
    """Let the base of a prepared loader, which begins epochs, see its notes."""
    loader.base_dataloader.__dict__[_NOTES] = notes(loader)


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
    """Whether Accelerate put this process on the device mps."""
    from accelerate.state import PartialState

    return bool(PartialState().device.type == "mps")


def exact() -> bool:
    """Whether a training on the device of this process is resumed exactly."""
    return in_recipe() or on_metal()


def active() -> Any:
    """The innermost prepared loader in whose loop the process is, or None."""
    from accelerate.state import GradientState

    return GradientState().active_dataloader


def loaders_among(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The loaders among what save_accelerator_state and load_accelerator_state are called with after the folder."""
    found: list[Any] = kwargs["dataloaders"] if "dataloaders" in kwargs else args[3]
    return found


def source_of(loader: Any) -> Any:
    """The prepared loader that a loader is the rest of, or itself."""
    found = notes(loader).source
    return loader if found is None else found


class _Watched(_SingleProcessDataLoaderIter):
    """A base loader's iterator that keeps its place; none is made, an iterator becomes one."""

    place: LoaderPosition
    replay: LoaderState | None

    @classmethod
    def become(cls, iterator: Any, place: LoaderPosition, replay: LoaderState | None) -> None:
        """Turn a plain iterator into one that keeps its place."""
        iterator.__class__ = cls
        iterator.place, iterator.replay = place, replay

    def _next_index(self) -> Any:
        index = super()._next_index()  # type: ignore[no-untyped-call]
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
        if self._dataset_kind == _DatasetKind.Map:
            self._next_index()
        else:
            self._next_data()


def begin(stock: OriginalCall, base: Any) -> Any:
    """Return the iterator of a base loader; that of one with notes keeps its place from now on.

    Workers draw from generators of their own: of their batches only the order of rows is kept.
    """
    of: LoaderNotes | None = base.__dict__.pop(_NOTES, None)  # not there meanwhile: two guards are put around __iter__
    if of is None:
        return stock(base)
    try:
        return _begin(stock, base, of)
    finally:
        base.__dict__[_NOTES] = of


def _begin(stock: OriginalCall, base: Any, of: LoaderNotes) -> Any:
    replay, of.replay = of.replay, None
    if replay is not None and replay.number is not None and replay.number < of.skipped:
        replay = None  # the script goes on from elsewhere
    own = generator(base)
    if replay is not None:
        replay.begun.put(own)
    of.place = LoaderPosition(States.now(generator=own), None, of.skipped)
    iterator = stock(base)
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


def capture(loader: Any, trained_on: int | None = None) -> LoaderState | None:
    """Where a loader that a step was just taken from is, to be stored; None where that is not known.

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
    """The generator that a user gave to a base loader or to its sampler."""
    if loader.generator is not None:
        return loader.generator
    sampler: Any = loader.batch_sampler
    while getattr(sampler, "batch_sampler", None) is not None:  # of a rest, or of several processes
        sampler = sampler.batch_sampler
    return getattr(getattr(sampler, "sampler", loader.sampler), "generator", None)
