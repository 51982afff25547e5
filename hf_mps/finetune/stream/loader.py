"""What Trainer takes its training batches from where rows are streamed: it counts, times the wait, and can go on.

The batches of one process or worker come from its readers in turn, each batch with its place.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import data_loader
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import TrainerCallback

from hf_mps.core import notices
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import write_json
from hf_mps.core.text import counted
from hf_mps.distributed.world import World
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.stream.batches import Arranging, Batches, Making
from hf_mps.finetune.stream.endless import SHOWN, Reader, Reading, TooManyBroken, Windows

FILE = "stream_{}.json"
"""What a checkpoint keeps of a rank's readers, beside its random state."""
READY = 4
"""Batches that each worker has ready where the recipe does not say: the first batch of a group takes longer."""


class StreamLoader:
    """The batches of a run on this rank's device, as many as the run has steps for; `len` is their number.

    Trainer iterates over it once. The batches of all ranks and workers are of different rows: each has readers of its
    own (`files.assign`), and no sampler or Accelerate deals them again. `waited` is how many seconds the training
    process waited for batches, the first one apart, `rows` and `tokens` what it got, over every part of a resumed run:
    of a part with another number of ranks an equal share, which need not be whole.
    """

    def __init__(self, trainer: Any, stream: Streamed, arranging: Arranging) -> None:
        self._trainer, self._stream = trainer, stream
        self._world = World.here()
        self._workers: int = trainer.args.dataloader_num_workers
        self._readers: dict[str, ReaderState] = {}
        self._tallies: dict[int, tuple[int, int]] = {}
        self._shown = 0
        self.worker_init_fn: Callable[[int], None] = _alone
        """As DataLoader has it: what a worker does first."""
        stream.arranging = arranging
        self.waited, self.first_wait = 0.0, 0.0
        self.rows, self.tokens = 0.0, 0.0

    def __len__(self) -> int:
        args = self._trainer.args
        return int(args.max_steps * args.gradient_accumulation_steps)

    @property
    def read(self) -> int:
        """Rows that were read from the files."""
        return sum(rows for rows, _ in self._tallies.values())

    @property
    def broken(self) -> int:
        """Rows among them that were skipped."""
        return sum(broken for _, broken in self._tallies.values())

    def begin(self, checkpoint: Path | None) -> None:
        """Deal the readers over ranks and workers, as `checkpoint` left them where there is one.

        Raises UserError for a checkpoint whose file is missing or cannot be used.
        """
        world, workers, counts = self._world, max(1, self._workers), dict[str, Any]()
        if checkpoint is None:
            readers = deal([], world, workers)
        else:
            # A rank beyond those of the run before has no file: rank 0's says how many there were.
            readers, counts = _stored(checkpoint, world.rank if (checkpoint / FILE.format(world.rank)).is_file() else 0)
            size, before = counts["workers"]
            if (size, before) != (world.size, workers):
                every = [reader for rank in range(size) for reader in _stored(checkpoint, rank)[0]]
                readers = deal(every, world, workers)
                now, then = world.size * workers, size * before
                if world.main:
                    how = "each has several parts of them" if now < then else "several share one part"
                    shared = f"{counted(then, 'reader')} shared the streamed rows before, {now} now"
                    notices.warn_user(f"{shared}: the rest of the rows is the same, {how}")
        self.waited, self.rows, self.tokens = (counts.get(name, 0) for name in ("waited", "rows", "tokens"))
        if counts and (size := counts["workers"][0]) != world.size:
            # Each rank counts its own, and all of them got as much.
            self.rows, self.tokens = (number * size / world.size for number in (self.rows, self.tokens))
        self._readers = {reader.name: reader for reader in readers}

    def __iter__(self) -> Iterator[Any]:
        args = self._trainer.args
        # The reader that has given fewest batches is the next one: its worker comes first.
        self._stream.assigned = [replace(one) for one in sorted(self._readers.values(), key=lambda one: one.count)]
        self._stream.collate = self._trainer.data_collator
        # An iterator draws a seed for its workers; a resumed run's own numbers are restored by then.
        settings: dict[str, Any] = {"num_workers": self._workers, "generator": torch.Generator()}
        if self._workers:
            ready = args.dataloader_prefetch_factor or READY
            settings |= {"prefetch_factor": ready, "worker_init_fn": self.worker_init_fn}
            if (context := getattr(args, "dataloader_multiprocessing_context", None)) is not None:
                settings["multiprocessing_context"] = context
        pinned = args.device.type == "cuda" and args.dataloader_pin_memory
        messages = iter(DataLoader(self._stream, batch_size=None, pin_memory=pinned, **settings))
        while True:
            begun = time.perf_counter()
            message = next(messages)
            seconds = time.perf_counter() - begun
            if self.first_wait:
                self.waited += seconds
            else:
                self.first_wait = seconds
            # Accelerate's, so that what is done about batches on their way to the device is done here too.
            yield data_loader.send_to_device(self._taken(message), args.device, non_blocking=pinned)

    def _taken(self, message: Message) -> dict[str, Any]:
        """Note what came with a batch, and return it. Raises RunError for the line that ended a worker."""
        if message.error:
            raise RunError(message.error)
        reader = self._readers[message.reader]
        reader.count = message.count
        reader.state = dict(reader.state or {}) if message.state is None else dict(message.state)
        reader.state["batch"] = message.given
        self.rows += message.rows
        self.tokens += message.tokens
        # Several workers may share a reader, and each reads all of its rows.
        self._tallies[reader.number] = max(message.tally, self._tallies.get(reader.number, (0, 0)))
        # Each worker shows its own first ones; of all workers together SHOWN are enough.
        for line in list(message.told)[: SHOWN - self._shown]:
            self._shown += 1
            notices.warn_user(f"{line}; it is skipped")
        return message.batch

    def save(self, folder: str) -> None:
        """Write where this rank's readers are into a checkpoint."""
        counts = {"waited": self.waited, "rows": self.rows, "tokens": self.tokens}
        workers = [self._world.size, max(1, self._workers)]
        stored = {"workers": workers, **counts, "readers": list(self._readers.values())}
        write_json(Path(folder) / FILE.format(self._world.rank), stored)


class Progress(TrainerCallback):  # type: ignore[misc]
    """Says how far a run is: Trainer counts batches from those of the present call, and a stream skips none."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / state.max_steps


def install(trainer: Any, stream: Streamed, arranging: Arranging) -> StreamLoader:
    """Let `trainer` take its training batches from `stream`, and keep in its checkpoints where that is."""
    trainer.train_loader = loader = StreamLoader(trainer, stream, arranging)
    trainer.add_callback(Progress())
    return loader


def deal(readers: Sequence[ReaderState], world: World, workers: int) -> list[ReaderState]:
    """Return the readers of this rank, in the order in which its workers take them.

    `readers` are those of all ranks of a run that goes on; none for a new run, which has one for each worker of each
    rank. Where there are fewer workers now, each takes several readers; where there are more, several share a reader,
    each with every second, third, … batch of what is left of it.
    """
    count = world.size * workers
    mine = range(world.rank * workers, (world.rank + 1) * workers)
    if not readers:
        return [ReaderState(str(number), number, count) for number in mine]
    if len(readers) >= count:
        return [reader for number in mine for reader in readers[number::count]]
    taken = []
    for number in mine:
        reader = readers[number % len(readers)]
        sharing = len(range(number % len(readers), count, len(readers)))
        part = reader.count, sharing, number // len(readers)
        name = f"{reader.name}/{part[-1]}" if sharing > 1 else reader.name
        taken.append(replace(reader, name=name, parts=(*reader.parts, part) if sharing > 1 else reader.parts))
    return taken


def _stored(checkpoint: Path, rank: int) -> tuple[list[ReaderState], dict[str, Any]]:
    """Return a rank's readers and counts as a checkpoint has them. Raises UserError where it has none."""
    path = checkpoint / FILE.format(rank)
    try:
        counts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kept = [ReaderState(**{**one, "parts": tuple(map(tuple, one["parts"]))}) for one in counts.pop("readers")]
        # Asked for by its name: a file without it is refused here.
        return kept, {"workers": counts["workers"], **counts}
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = "does not say where the streamed rows were"
        raise UserError(f"{checkpoint}: {path.name} {told}; next: an older checkpoint, or --fresh") from error


def _alone(worker: int) -> None:
    """Let a worker tokenise on its own thread: the tokenizer's threads do not live on in a forked process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


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
