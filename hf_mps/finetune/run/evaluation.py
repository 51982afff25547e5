"""Evaluations over exactly the rows of a split: every row, in order, once, however many processes share them.

accelerate gives each process a batch of every N and fills the last ones up with rows from the beginning; what was
gathered is then cut to the rows that there are, but the loss of a filled batch is a mean over the repeated rows too
(accelerator.py, `gather_for_metrics`). Here each batch is one process's whole, as it would be one process's alone; a
process that has none left takes part with one that counts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hf_mps.finetune.text import buckets


class ExactEvaluation:
    """A part of a Trainer: evaluations see every row in order, and where there are several processes each row once.

    `dataloader_drop_last` and `train_sampling_strategy` are for training alone: an evaluation without some rows would
    score another split; one sorted by length would give its answers to other rows than predictions.csv and the metrics
    of whole answers expect.
    """

    args: Any
    accelerator: Any
    gather_function: Any

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        from torch.utils.data import SequentialSampler

        if getattr(self.args, buckets.KEY, buckets.RANDOM) == "group_by_length":
            return SequentialSampler(eval_dataset)
        return super()._get_eval_sampler(eval_dataset)  # type: ignore[misc]

    def get_eval_dataloader(self, *arguments: Any, **settings: Any) -> Any:
        """Return the loader of a validation split, without a row left out."""
        with _keeping_last(self.args):
            return _dealt(super().get_eval_dataloader(*arguments, **settings))  # type: ignore[misc]

    def get_test_dataloader(self, *arguments: Any, **settings: Any) -> Any:
        """Return the loader of rows to predict, without a row left out."""
        with _keeping_last(self.args):
            return _dealt(super().get_test_dataloader(*arguments, **settings))  # type: ignore[misc]

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **settings: Any) -> Any:
        """Evaluate as Trainer does, gathering from each process the rows of its batch that count."""
        from transformers import Seq2SeqTrainer

        stock = super().evaluation_loop  # type: ignore[misc]
        if self.args.world_size == 1:
            if isinstance(self, Seq2SeqTrainer):
                # Its own gathering lets a last, smaller batch's loss count as that of a whole one.
                self.gather_function = self.accelerator.gather_for_metrics
            return stock(dataloader, *arguments, **settings)
        dealt = getattr(getattr(dataloader, "batch_sampler", None), "batch_sampler", None)
        if not isinstance(dealt, Dealt):  # a stream of rows has no batches to deal
            return stock(dataloader, *arguments, **settings)
        rounds = _Rounds(dataloader)
        self.gather_function = lambda data: _gathered(self.accelerator, data, dealt.counts[rounds.given - 1])
        # Each batch's loss is over its own labels: those of a process that counts nothing would be among all others'.
        over_all, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            return stock(rounds, *arguments, **settings)  # it puts Trainer's own function back
        finally:
            self.args.average_tokens_across_devices = over_all


@contextmanager
def _keeping_last(args: Any) -> Iterator[None]:
    """Keep the last, smaller batch of the loaders that are made in this block."""
    dropped, args.dataloader_drop_last = args.dataloader_drop_last, False
    try:
        yield
    finally:
        args.dataloader_drop_last = dropped


def _dealt(loader: Any) -> Any:
    """Deal each batch of several processes' loader to one of them whole."""
    from accelerate.data_loader import BatchSamplerShard

    shard: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(shard, BatchSamplerShard) or shard.split_batches:
        return loader
    if not isinstance(shard.batch_sampler, Dealt):  # one that persistent workers keep was dealt before
        shard.batch_sampler = Dealt(shard.batch_sampler, shard.process_index, shard.num_processes)
        # As Trainer has it for a sampler of its own that knows the processes (trainer.py, `_get_dataloader`).
        shard.process_index, shard.num_processes, shard.even_batches = 0, 1, False
    return loader


class Dealt:
    """The batches of the process numbered `rank` among `size`: each `size`-th of `batches`, and of these as many as all
    have.

    Where the batches run out within a round, the processes without one get the first batch once more; `counts` has, for
    each round and process, the rows that count.
    """

    drop_last = False

    def __init__(self, batches: Any, rank: int, size: int) -> None:
        self._batches = batches
        self._rank = rank
        self._size = size
        self.batch_size = getattr(batches, "batch_size", None)
        self.counts: list[list[int]] = []

    def __len__(self) -> int:
        return -(-len(self._batches) // self._size)

    def __iter__(self) -> Iterator[list[int]]:
        self.counts = []
        first: list[int] = []
        dealt: list[list[int]] = []
        for batch in self._batches:
            first = first or batch
            dealt.append(batch)
            if len(dealt) == self._size:
                yield self._round(dealt, first)
                dealt = []
        if dealt:
            yield self._round(dealt, first)

    def _round(self, dealt: list[list[int]], first: list[int]) -> list[int]:
        missing = self._size - len(dealt)
        self.counts.append([*map(len, dealt), *[0] * missing])
        return [*dealt, *[first] * missing][self._rank]

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch on."""
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)


class _Rounds:
    """A data loader that knows how many batches it has given."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.given = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self.given += 1
            yield batch


def _gathered(accelerator: Any, data: Any, counts: list[int]) -> Any:
    """The first `counts[process]` rows of each process's tensors in `data`, in the order of the processes."""
    import torch
    from accelerate.utils import recursively_apply

    own, most = counts[accelerator.process_index], max(counts)

    def gather(tensor: Any) -> Any:
        rows = tensor[:own]
        padded = torch.cat([rows, rows.new_zeros(most - own, *rows.shape[1:])])
        every = accelerator.gather(padded)
        return torch.cat([every[most * place : most * place + count] for place, count in enumerate(counts)])

    return recursively_apply(gather, data)
