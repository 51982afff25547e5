"""Evaluations over exactly the rows of a split: every row, in order, once, however many processes share them.

accelerate gives each process a batch of every N and fills the last ones up with rows from the beginning; what was
gathered is then cut to the rows that there are, but the loss of a filled batch is a mean over the repeated rows too
(accelerator.py, `gather_for_metrics`). Here each batch is one process's whole, as it would be one process's alone; a
process that has none left takes part with one that counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from hf_mps.finetune.text import buckets

LOADERS = ("get_eval_dataloader", "get_test_dataloader")


def every_row(trainer: Any) -> None:
    """Let evaluations of `trainer` see every row in order, and where there are several processes each row once.

    `dataloader_drop_last` and `train_sampling_strategy` are for training alone: an evaluation without some rows would
    score another split; one sorted by length would give its answers to other rows than predictions.csv and the metrics
    of whole answers expect.
    """
    from torch.utils.data import SequentialSampler
    from transformers import Seq2SeqTrainer

    if getattr(trainer.args, buckets.KEY, buckets.RANDOM) == "group_by_length":
        trainer._get_eval_sampler = SequentialSampler
    if trainer.args.dataloader_drop_last:
        for name in LOADERS:
            setattr(trainer, name, _undropped(trainer.args, getattr(trainer, name)))
    if trainer.args.world_size > 1:
        for name in LOADERS:
            setattr(trainer, name, _dealt(getattr(trainer, name)))
        trainer.evaluation_loop = _exact(trainer, trainer.evaluation_loop)
    elif isinstance(trainer, Seq2SeqTrainer):
        trainer.evaluation_loop = _by_rows(trainer, trainer.evaluation_loop)


def _undropped(args: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    def loader(*arguments: Any, **settings: Any) -> Any:
        args.dataloader_drop_last = False
        try:
            return stock(*arguments, **settings)
        finally:
            args.dataloader_drop_last = True

    return loader


def _dealt(stock: Callable[..., Any]) -> Callable[..., Any]:
    def loader(*arguments: Any, **settings: Any) -> Any:
        from accelerate.data_loader import BatchSamplerShard

        made = stock(*arguments, **settings)
        shard: Any = getattr(made, "batch_sampler", None)
        if not isinstance(shard, BatchSamplerShard) or shard.split_batches:
            return made
        if not isinstance(shard.batch_sampler, Dealt):  # one that persistent workers keep was dealt before
            shard.batch_sampler = Dealt(shard.batch_sampler, shard.process_index, shard.num_processes)
            # As Trainer has it for a sampler of its own that knows the processes (trainer.py, `_get_dataloader`).
            shard.process_index, shard.num_processes, shard.even_batches = 0, 1, False
        return made

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


def _by_rows(trainer: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Seq2SeqTrainer's `evaluation_loop` without its own gathering, which lets a last, smaller batch's loss count as
    that of a whole one.
    """

    def loop(*arguments: Any, **settings: Any) -> Any:
        trainer.gather_function = trainer.accelerator.gather_for_metrics
        return stock(*arguments, **settings)

    return loop


def _exact(trainer: Any, stock: Callable[..., Any]) -> Callable[..., Any]:
    """Trainer's `evaluation_loop`, which gathers from each process the rows of its batch that count."""

    def loop(dataloader: Any, *arguments: Any, **settings: Any) -> Any:
        dealt = getattr(getattr(dataloader, "batch_sampler", None), "batch_sampler", None)
        if not isinstance(dealt, Dealt):  # a stream of rows has no batches to deal
            return stock(dataloader, *arguments, **settings)
        rounds = _Rounds(dataloader)
        trainer.gather_function = lambda data: _gathered(trainer.accelerator, data, dealt.counts[rounds.given - 1])
        # Each batch's loss is over its own labels: those of a process that counts nothing would be among all others'.
        over_all, trainer.args.average_tokens_across_devices = trainer.args.average_tokens_across_devices, False
        try:
            return stock(rounds, *arguments, **settings)  # it puts Trainer's own function back
        finally:
            trainer.args.average_tokens_across_devices = over_all

    return loop


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
