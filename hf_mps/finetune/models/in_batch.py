"""Losses over a batch's other rows, where several processes have a part of the batch each, and passes that they share.

A pair's negatives are the other pairs of the whole step, so that two processes with half a batch each learn what one
learns from the whole: sentence-transformers gathers the embeddings with their gradients for the losses that say so
(`gather_across_devices`); CoSENTLoss, which compares all pairs' scores, is given the embeddings of all here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hf_mps.distributed.ranks import Ranks
from hf_mps.distributed.world import World

ACROSS = "gather_across_devices"
GATHERED = ("CoSENTLoss", "FlopsLoss")
"""Those that do not gather themselves. FlopsLoss, SpladeLoss's regularizer, squares the mean over a batch: a mean over
processes of that would be another, larger cost."""


def make(losses: Any, name: str, model: Any) -> Any:
    """Return the loss `name` of sentence-transformers' module `losses` for `model`, over all processes' rows."""
    loss = getattr(losses, name)
    if World.here().alone:
        return loss(model)
    if name in GATHERED:
        return _gathering(loss)(model)
    made = loss(model)
    if hasattr(made, ACROSS):
        made.gather_across_devices = True
    return made


def arguments(*, ranked: bool) -> dict[str, Any]:
    """Return the training arguments that suit the losses: with `ranked` pairs no text comes twice in a step.

    Where there are several processes, sentence-transformers drops the last rows of an epoch that do not fill the
    batches of all (its training_args.py says so, and does it whatever it is told).
    """
    drawn = {"batch_sampler": "no_duplicates"} if ranked else {}
    return drawn if World.here().alone else {**drawn, "dataloader_drop_last": True}


@contextmanager
def within_a_process(loss: Any) -> Iterator[None]:
    """Let `loss` look at its own process's rows alone: in an evaluation batches may be of different size."""
    gathering = [part for part in loss.modules() if getattr(part, ACROSS, False)]  # SpladeLoss is of three
    for part in gathering:
        part.gather_across_devices = False
    try:
        yield
    finally:
        for part in gathering:
            part.gather_across_devices = True


def each_once(model: Any, order: Sequence[int], size: int, compute: Callable[[Sequence[int]], Any]) -> list[Any]:
    """Return what `compute` makes of each number in `order`, by number, in batches of `size` without gradients.

    `compute` returns a tensor whose first dimension is that of its numbers. Where there are several processes each
    computes a batch of every so many, and all get all.
    """
    import torch

    results: list[Any] = [None] * len(order)
    world, was_training = World.here(), model.training
    model.eval()
    with torch.no_grad():
        for begin in range(0, len(order), size * world.size):
            dealt = [order[begin + size * rank :][:size] for rank in range(world.size)]
            made = compute(dealt[world.rank] or dealt[0])  # every process takes part in each pass
            for numbers, part in zip(dealt, Ranks.here().exchange(made.cpu().numpy()), strict=True):
                # A process without a batch has computed another's, and has no numbers for it.
                for number, result in zip(numbers, part, strict=False):
                    results[number] = result
    model.train(was_training)
    return results


def _gathering(loss: Any) -> Any:
    """Return a class of `loss` that computes on all processes the loss of all rows.

    The gradient of each process's embeddings is the sum over all processes' equal losses, of which DDP takes the mean.
    """
    from sentence_transformers.util import all_gather, all_gather_with_grad

    class Gathering(loss):  # type: ignore[misc]
        gather_across_devices = True

        def compute_loss_from_embeddings(self, embeddings: Any, *labels: Any) -> Any:
            if self.gather_across_devices:
                gather = all_gather_with_grad  # of several columns; a regularizer is given those of one
                embeddings = list(map(gather, embeddings)) if isinstance(embeddings, list) else gather(embeddings)
                labels = tuple(map(all_gather, labels))
            return super().compute_loss_from_embeddings(embeddings, *labels)

    Gathering.__name__ = loss.__name__
    return Gathering


class Parts:
    """A batch sampler that draws the batches of a whole step from `batches` and gives one process's part at a time.

    What sentence-transformers' samplers promise of a batch (no text twice) then holds over all processes.
    """

    def __init__(self, batches: Any, size: int) -> None:
        self.sampler = batches
        """accelerate sets the epoch of a sampler of this name, in several processes of no other (data_loader.py)."""
        self.batch_size = batches.batch_size // size
        self.drop_last = batches.drop_last
        self._size = size

    def __len__(self) -> int:
        return len(self.sampler) * self._size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.sampler:
            for place in range(self._size):
                yield batch[place * self.batch_size : (place + 1) * self.batch_size]
