"""What Trainer takes its training batches from where rows are streamed: it counts, times the wait, and can go on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hf_mps.finetune.stream.dataset import Assignment, Message, Streamed
from hf_mps.finetune.stream.endless import SHOWN

FILE = "stream_{}.json"
"""A rank's places in a checkpoint, beside its random state."""
READY = 4
"""Batches that each worker has ready where the recipe does not say: what begins a group takes longer."""


class StreamLoader:
    """The batches of a run on this rank's device, as many as the run has steps for; `len` is their number.

    Trainer iterates over it once. The batches of all ranks and workers are of different rows: each has lanes of its own
    (`units.share`), and no sampler or Accelerate deals them again. `waited` is how many seconds the training process
    stood still for a batch, the first one's apart, `rows` and `tokens` what it got, over every part of a resumed run.
    """

    def __init__(self, trainer: Any, stream: Streamed, arranging: Arranging) -> None:
        self._trainer = trainer
        self._stream = stream
        self._world = World.here()
        self._workers: int = trainer.args.dataloader_num_workers
        self._lanes: dict[str, Assignment] = {}
        self._tallies: dict[str, tuple[int, int]] = {}
        self._shown = 0
        self.worker_init_fn: Callable[[int], None] = _alone
        """As DataLoader has it: what a worker does first."""
        stream.arranging = arranging
        self.waited, self.first_wait = 0.0, 0.0
        self.rows, self.tokens = 0, 0

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
        """Deal the lanes over ranks and workers, as `checkpoint` left them where there is one. Raises UserError."""
        readers = max(1, self._workers)
        if checkpoint is not None:
            lanes, counts = _stored(checkpoint, self._world, readers)
        else:
            lanes, counts = deal([], self._world, readers), {}
        self.waited, self.rows, self.tokens = (counts.get(name, 0) for name in ("waited", "rows", "tokens"))
        self._lanes = {lane.name: lane for lane in lanes}

    def __iter__(self) -> Iterator[Any]:
        args = self._trainer.args
        # The lane that has given fewest batches is the next one: its worker comes first.
        self._stream.assigned = [replace(lane) for lane in sorted(self._lanes.values(), key=lambda lane: lane.count)]
        self._stream.collate = self._trainer.data_collator
        settings: dict[str, Any] = {}
        if self._workers:
            context = getattr(args, "dataloader_multiprocessing_context", None)
            settings = {"prefetch_factor": args.dataloader_prefetch_factor or READY}
            settings |= {"worker_init_fn": self.worker_init_fn}
            settings |= {"multiprocessing_context": context} if context is not None else {}
        pinned = args.device.type == "cuda" and args.dataloader_pin_memory
        loader = DataLoader(
            self._stream,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._workers,
            pin_memory=pinned,
            # An iterator draws a seed for its workers; a resumed run's own numbers are restored by then.
            generator=torch.Generator(),
            **settings,
        )
        messages = iter(loader)
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
        lane = self._lanes[message.lane]
        lane.count = message.count
        if message.state is not None:
            lane.state = dict(message.state)
        assert lane.state is not None
        lane.state["batch"] = message.given
        self.rows += message.rows
        self.tokens += message.tokens
        self._tallies[lane.name] = message.tally
        for line in list(message.told)[: SHOWN - self._shown]:
            self._shown += 1
            notices.warn_user(f"{line}; it is skipped")
        return message.batch

    def save(self, folder: str) -> None:
        """Write where this rank's lanes are into a checkpoint."""
        counts = {"waited": self.waited, "rows": self.rows, "tokens": self.tokens}
        readers = [self._world.size, max(1, self._workers)]
        lanes = list(self._lanes.values())
        write_json(Path(folder) / FILE.format(self._world.rank), {"readers": readers, **counts, "lanes": lanes})


class Progress(TrainerCallback):  # type: ignore[misc]
    """Says how far a run is: Trainer counts batches from those of the present call, and a stream skips none."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.epoch = state.global_step / state.max_steps


def install(trainer: Any, stream: Streamed, arranging: Arranging) -> StreamLoader:
    """Let `trainer` take its training batches from `stream`, and keep in its checkpoints where that is."""
    trainer.train_loader = loader = StreamLoader(trainer, stream, arranging)
    trainer.add_callback(Progress())
    return loader


def deal(lanes: Sequence[Assignment], world: World, workers: int) -> list[Assignment]:
    """Return the lanes of this rank, in the order in which its workers take them.

    `lanes` are those of all ranks of a run that goes on; none for a new run, which has one for each worker of each
    rank. Fewer readers take several lanes each; of more readers several share a lane, each with every second, third, …
    batch of what is left of it.
    """
    readers = world.size * workers
    mine = range(world.rank * workers, (world.rank + 1) * workers)
    if not lanes:
        return [Assignment(str(number), number, readers) for number in mine]
    if len(lanes) >= readers:
        return [lane for number in mine for lane in lanes[number::readers]]
    taken = []
    for number in mine:
        lane = lanes[number % len(lanes)]
        sharing = len(range(number % len(lanes), readers, len(lanes)))
        part = lane.count, sharing, number // len(lanes)
        name = f"{lane.name}/{part[-1]}" if sharing > 1 else lane.name
        taken.append(replace(lane, name=name, parts=(*lane.parts, part) if sharing > 1 else lane.parts))
    return taken


def _stored(checkpoint: Path, world: World, workers: int) -> tuple[list[Assignment], dict[str, Any]]:
    """Return this rank's lanes and counts as a checkpoint has them; all ranks' lanes are dealt anew to other readers.

    Raises UserError where a file is missing.
    """
    own = _file(checkpoint, world.rank if (checkpoint / FILE.format(world.rank)).is_file() else 0)
    size, before = own["readers"]
    if (size, before) == (world.size, workers):
        return [_assignment(one) for one in own["lanes"]], own
    every = [_assignment(one) for rank in range(size) for one in _file(checkpoint, rank)["lanes"]]
    now, then = world.size * workers, size * before
    if world.main:
        left = "each has several of them" if now < then else "several share one"
        notices.warn_user(
            f"{counted(then, 'reader')} dealt the streamed rows before, {now} now: the same are left, {left}"
        )
    return deal(every, world, workers), own


def _file(checkpoint: Path, rank: int) -> dict[str, Any]:
    path = checkpoint / FILE.format(rank)
    try:
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        told = "says not where the streamed rows were"
        raise UserError(f"{checkpoint}: {path.name} {told}; next: an older checkpoint, or --fresh") from error
    return stored


def _assignment(stored: Mapping[str, Any]) -> Assignment:
    return Assignment(**{**stored, "parts": tuple(tuple(part) for part in stored["parts"])})


def _as_it_is(message: Any) -> Any:
    return message


def _alone(worker: int) -> None:
    """Let a worker tokenise on its own thread: the tokenizer's threads do not live on in a forked process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
