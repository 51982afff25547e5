"""What Trainer takes its training batches from where rows are streamed: it counts, times the wait, and can go on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import data_loader
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_mps.core import notices
from hf_mps.core.errors import RunError, UserError
from hf_mps.core.files import write_json
from hf_mps.core.text import counted
from hf_mps.distributed.world import World
from hf_mps.finetune.stream.batches import Arranging
from hf_mps.finetune.stream.dataset import Message, ReaderState, Streamed
from hf_mps.finetune.stream.endless import SHOWN

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
