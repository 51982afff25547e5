"""Batches of different size for machines of different speed: a step's rows are the same, dealt by measured speed.

Each rank takes its share of the rows that a step has anyway, so that all are done at the same time; the loss stays the
mean over all of the step's items, as each rank's part is weighed by its items.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.distributed.ranks import Ranks
from hf_mps.finetune.capture import precision
from hf_mps.finetune.run.callbacks import finish

if TYPE_CHECKING:
    from hf_mps.finetune.tasks._base import Prepared

KEY, MEASURED = "batches", "measured"
TRIALS = 4
"""Forward and backward passes that a rank's speed is measured by; the first, which compiles, does not count."""


class Shares(BatchSampler):
    """A batch sampler that gives the ranks in turn, `sizes[rank]` rows each, the rows that a step has in all.

    The last step of an epoch is filled with rows of the first one, as accelerate fills it, or left out (`drop_last`).
    """

    def __init__(self, sampler: Any, sizes: Sequence[int], drop_last: bool) -> None:
        super().__init__(sampler, max(sizes), drop_last)
        self.sizes = list(sizes)

    def __len__(self) -> int:
        rows, total = len(self.sampler), sum(self.sizes)  # type: ignore[arg-type]
        return len(self.sizes) * (rows // total if self.drop_last else -(-rows // total))

    def __iter__(self) -> Iterator[list[int]]:
        first: list[int] = []
        rows, total = iter(self.sampler), sum(self.sizes)
        while step := list(islice(rows, total)):
            first = first or step
            if len(step) < total:
                if self.drop_last:
                    return
                step += islice(cycle(first), total - len(step))
            at = 0
            for size in self.sizes:
                yield step[at : at + size]
                at += size


class KeptShares(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Keeps the shares in every checkpoint: a run that goes on deals rows as it began, whatever a new trial says."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)

    def state(self) -> dict[str, Any]:
        """The shares as Trainer stores them."""
        return {"args": {"sizes": self.sizes}, "attributes": {}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.stateful_callbacks.setdefault(type(self).__name__, self.state())


def install(trainer: Any, prepared: Prepared, choices: dict[str, Choice[Any]], checkpoint: Path | None) -> None:
    """Deal the rows of each step as the choice says, by measured speed or as it is given; called by all ranks.

    Raises UserError for shares that are not those of the step, and where a trainer has a loss of its own.
    """
    ranks, choice = Ranks.here(), choices.get(KEY)
    if choice is None or ranks.world.alone:
        return
    batch = choices["batch"].value
    total = batch * ranks.world.size
    if choice.value == MEASURED:
        sizes = _stored(checkpoint, ranks.world.size, total)
        if sizes is None:
            speeds = ranks.gather(_rows_a_second(trainer, prepared, batch))
            sizes = dealt(total, speeds)
            told = ", ".join(f"{speed:.3g}" for speed in speeds)
            choice = Choice(sizes, f"of {total} rows a step, by {told} rows a second of each rank, measured")
        else:
            choice = Choice(sizes, "as measured when the run began")
    sizes = choice.value
    if len(sizes) != ranks.world.size or sum(sizes) != total:
        raise UserError(
            f"link.batches is {sizes}; allowed: {ranks.world.size} numbers, one a rank, {total} in all, which is the"
            f" batch of {batch} for each"
        )
    choices[KEY] = choice
    _refuse(trainer)
    _deal(trainer, sizes)
    _weigh(trainer, sizes, ranks.world.rank)
    trainer.add_callback(KeptShares(sizes))


def dealt(total: int, speeds: Sequence[float]) -> list[int]:
    """Return `total` rows dealt in proportion to `speeds`, at least one to each, the rest to the largest remainders."""
    exact = [max(1.0, total * speed / sum(speeds)) for speed in speeds]
    sizes = [int(share) for share in exact]
    by_rest = sorted(range(len(sizes)), key=lambda rank: sizes[rank] - exact[rank])
    for rank in islice(cycle(by_rest), max(0, total - sum(sizes))):
        sizes[rank] += 1
    while sum(sizes) > total:  # a rank far slower than the others has got one row more than its share
        sizes[sizes.index(max(sizes))] -= 1
    return sizes


def _stored(checkpoint: Path | None, ranks: int, total: int) -> list[int] | None:
    """Return the shares that the run of a checkpoint began with, None where there are none of this world's."""
    if checkpoint is None:
        return None
    content = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    found = content.get("stateful_callbacks", {}).get(KeptShares.__name__)
    sizes = found["args"]["sizes"] if found else []
    return sizes if len(sizes) == ranks and sum(sizes) == total else None


def _rows_a_second(trainer: Any, prepared: Prepared, batch: int) -> float:
    """Return how many rows this rank trains in a second, by forward and backward passes that leave no trace."""
    device, model = trainer.args.device, trainer.model
    inputs = trainer._prepare_inputs(precision.sample(prepared, batch))
    training, buffers = model.training, {name: one.clone() for name, one in model.named_buffers()}
    took = []
    kind = {"device_type": device.type} if device.type != "cpu" else {}
    with torch.random.fork_rng(devices=[device] if kind else [], **kind):
        model.train()
        for _ in range(TRIALS):
            finish(device)
            began = time.perf_counter()
            loss = model(**inputs)["loss"]
            loss.backward()
            float(loss)  # waits for the device
            finish(device)
            took.append(time.perf_counter() - began)
            model.zero_grad(set_to_none=True)
    model.train(training)
    for name, one in model.named_buffers():
        one.data.copy_(buffers[name])
    return batch / min(took[1:])


def _refuse(trainer: Any) -> None:
    kind = type(trainer)
    if isinstance(trainer.train_dataset, torch.utils.data.IterableDataset):
        raise UserError("link.batches deals rows that are at hand, and data.streaming has none; leave one of them out")
    if kind.compute_loss is not Trainer.compute_loss or trainer.compute_loss_func is not None:
        raise UserError(
            f"link.batches weighs a mean over rows, and {kind.__name__} has a loss of its own; next: link.batches=equal"
        )


def _deal(trainer: Any, sizes: Sequence[int]) -> None:
    """Give accelerate's shard of each rank, which takes every n-th batch, batches of `sizes` in turn."""
    stock: Callable[[], Any] = trainer.get_train_dataloader

    def loader() -> Any:
        made = stock()
        shard = made.batch_sampler
        shard.batch_sampler = Shares(shard.batch_sampler.sampler, sizes, shard.drop_last)
        shard.batch_size = None  # "a list of indices with dynamic length" (accelerate's BatchSamplerShard)
        return made

    trainer.get_train_dataloader = loader


def _weigh(trainer: Any, sizes: Sequence[int], rank: int) -> None:
    """Weigh this rank's mean by its items, where the model takes the mean itself.

    DistributedDataParallel averages over ranks. A model that is given the number of items in a step (Trainer's
    `num_items_in_batch`) divides by it, and is left alone.
    """
    stock: Callable[..., Any] = trainer.compute_loss
    of_rows = sizes[rank] * len(sizes) / sum(sizes)

    def compute_loss(model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not model.training or trainer.model_accepts_loss_kwargs:
            return stock(model, inputs, *args, **kwargs)
        labels = inputs.get("labels")
        share: Any = of_rows
        if isinstance(labels, torch.Tensor) and labels.ndim > 1 and not labels.is_floating_point():
            items = (labels != -100).sum()
            share = items * len(sizes) / trainer.accelerator.reduce(items, "sum")
        return stock(model, inputs, *args, **kwargs) * share

    trainer.compute_loss = compute_loss
