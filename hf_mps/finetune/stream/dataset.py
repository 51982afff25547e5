"""The batches of one process or worker, for PyTorch's DataLoader: its readers in turn, each batch with its place."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hf_mps.core.errors import UserError
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.stream.batches import Arranging, Batches, Making
from hf_mps.finetune.stream.endless import Reader, Reading, TooManyBroken, Windows


@dataclass
class Message:
    """What a worker hands over: a collated batch of the reader called `reader`, or in `error` the line that ends the
    run.

    `count` is the reader's after this batch, `given` the batch's number in its group, `state` where that group began
    (None where an earlier message said so), `tally` the rows that the reader has read and the broken ones among them.
    """

    reader: str = ""
    batch: dict[str, Any] = field(default_factory=dict)
    rows: int = 0
    tokens: int = 0
    count: int = 0
    given: int = 0
    state: dict[str, Any] | None = None
    tally: tuple[int, int] = (0, 0)
    told: Sequence[str] = ()
    error: str = ""

    def pin_memory(self) -> Message:
        """Return the message with its tensors in pinned memory, for a DataLoader's thread that does so."""
        pinned = {name: one.pin_memory() if isinstance(one, torch.Tensor) else one for name, one in self.batch.items()}
        return replace(self, batch=pinned)


@dataclass
class ReaderState:
    """A reader as one process has it: its name in checkpoints, its number of `readers`, and where it goes on.

    `parts` are (first, every, mine) of a reader that several took over from a run of fewer readers: of its batches from
    number `first` on, each `every`-th is theirs, the one with remainder `mine`. `count` is how many batches it has
    given so far, those of others among them.
    """

    name: str
    number: int
    readers: int
    count: int = 0
    parts: tuple[tuple[int, int, int], ...] = ()
    state: dict[str, Any] | None = None

    def mine(self, count: int) -> bool:
        """Return whether batch number `count` of the reader is this process's."""
        return all((count - first) % every == mine for first, every, mine in self.parts)


def train(rows: Rows, sample: Any, making: Making) -> Streamed:
    """Return what a task trains on where its `rows` have a stream; `sample` are features of the first ones."""
    assert rows.stream is not None
    return Streamed(rows.stream.reading, making, rows.stream.buffer, sample, len(rows.dataset))


class Streamed(IterableDataset[Message]):
    """The training rows of a run that streams them; `sample` are features of the first `sampled` rows, made like all.

    It is iterated over by `stream.loader` alone, once `arrange` has said what a batch is and `assigned` who reads what.
    Of w workers of a DataLoader each takes every w-th of the assigned readers. Two streams with equal fields give equal
    batches, random draws of the collator included.
    """

    streams = True

    def __init__(self, reading: Reading, making: Making, buffer: int, sample: Any, sampled: int = 1) -> None:
        super().__init__()
        self.reading, self.making, self.buffer = reading, making, buffer
        self.sample, self.sampled = sample, sampled
        self.arranging = Arranging(1)
        self.collate: Callable[[list[Any]], Any] = dict
        self.assigned: Sequence[ReaderState] = ()

    def __getstate__(self) -> dict[str, Any]:
        # A worker needs no sample, and what it encodes with is often a function inside another.
        from datasets.utils._dill import dumps

        return {"pickled": dumps({**self.__dict__, "sample": None})}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        import dill

        self.__dict__.update(dill.loads(state["pickled"]))

    def __iter__(self) -> Iterator[Message]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        messages = [self._messages(reader) for reader in self.assigned[number::workers]]
        try:
            while messages:
                for of_reader in messages:
                    yield next(of_reader)
        except (TooManyBroken, UserError) as error:
            # DataLoader would wrap an exception in its traceback, and a person wants the line.
            yield Message(error=str(error))

    def _messages(self, reader: ReaderState) -> Iterator[Message]:
        seed, number = self.reading.seed, reader.number
        rows = Windows(Reader(self.reading, number, reader.readers), self.buffer, seed, reader.state)
        state: dict[str, Any] | None = None
        for made in Batches(rows, self.making, self.arranging, reader.state):
            state = made.state or state
            count = reader.count
            reader.count += 1
            if not reader.mine(count):
                continue
            # Draws (masks) depend on the reader and the batch's number alone, not on the process that makes the batch.
            with torch.random.fork_rng(devices=[]):
                # Python's own hash of a text is another in each process.
                torch.manual_seed(zlib.crc32(f"{seed}/{number}/{count}".encode()))
                batch = dict(self.collate(made.examples))
            tokens = sum(len(one["input_ids"]) for one in made.examples)
            tally = made.tally.rows, made.tally.broken
            position = (reader.count, made.given, state)
            yield Message(reader.name, batch, len(made.examples), tokens, *position, tally, made.told)
            state = None
