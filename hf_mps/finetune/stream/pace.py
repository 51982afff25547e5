"""What a run decides about streamed rows: how many steps it has, when it evaluates, who reads ahead."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.distributed.world import World
from hf_mps.finetune.text import buckets

if TYPE_CHECKING:
    from hf_mps.finetune.recipe.schema import Recipe
    from hf_mps.finetune.stream.loader import Streamed

EVALUATIONS = 3
"""Evaluations, and checkpoints, of a run whose recipe does not say."""
WORKERS = 2
CORES = 4
"""With so many cores two of them read ahead."""


def refuse_endless(recipe: Recipe) -> None:
    """Raise UserError for a run on streamed rows whose length nothing says."""
    training, data = recipe.training, recipe.data
    if training.get("num_train_epochs") is not None:
        remedy = "next, in its place: training.max_steps=N, or data.rows.train=N for so many rows"
        raise UserError(f"training.num_train_epochs: nobody counts streamed rows, so an epoch has no length; {remedy}")
    if training.get("max_steps", -1) < 1 and data.rows.train is None:
        told = "nobody counts streamed rows, so the recipe says how long the run is"
        remedy = "next: training.max_steps=1000, or data.rows.train=100000 for so many rows"
        raise UserError(f"data.streaming: {told}; {remedy}")


def steps(training: Mapping[str, Any], stream: Streamed, rows: int | None, batch: int, passes: int) -> Choice[int]:
    """Return the number of optimizer steps: the recipe's, or as many as take `rows` rows of the files."""
    if training.get("max_steps", -1) > 0:
        return Choice(training["max_steps"], "max_steps in the recipe")
    assert rows is not None, "refuse_endless"
    each = len(stream.sample) / stream.sampled
    together = batch * passes * World.here().size
    number = max(1, math.ceil(rows * each / together))
    about = "" if each == 1 else f"about, since {stream.sampled:,} rows made {len(stream.sample):,} samples; "
    return Choice(number, f"{about}{rows:,} rows (data.rows.train) at {together} samples a step")


def workers() -> Choice[int]:
    """Choose how many processes read and tokenise ahead of the training."""
    cores = os.cpu_count() or 1
    if cores < CORES:
        return Choice(0, f"{counted(cores, 'core')}: the training process reads and tokenises its rows itself")
    return Choice(WORKERS, "they read, tokenise and pack ahead of the training, so that the device does not wait")


def sampling(stream: Streamed, grouped: Choice[str]) -> Choice[str]:
    """Choose how batches are drawn; `grouped` is what would be chosen of rows that are there whole."""
    mixed = f"rows are mixed {stream.buffer:,} at a time, seeded, after the slices of the files"
    if stream.making.joined or stream.making.pack is not None:
        return Choice(buckets.RANDOM, f"every row is of one length; {mixed}")
    if not buckets.grouped(grouped):
        return Choice(buckets.RANDOM, f"{grouped.reason}; {mixed}")
    return Choice(buckets.BUCKETED, f"a batch holds rows of one length, sought among 32 batches; {mixed}")


def readers(stream: Streamed, processes: int) -> Choice[str]:
    """Describe who reads which part of the files."""
    number = World.here().size * max(1, processes)
    slices = [len(corpus.slices) for corpus in stream.reading.corpora]
    reason = f"it reads {counted(sum(slices), 'slice')} of the files in turn, none twice in a pass"
    if number > 1:
        reason = f"they share {counted(sum(slices), 'slice')} of the files, none read twice in a pass"
    if min(slices) < number:
        reason += f"; of {counted(min(slices), 'slice')} each reads all lines and keeps its own: more files are faster"
    return Choice(counted(number, "reader"), reason)
