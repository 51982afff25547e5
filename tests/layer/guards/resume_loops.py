"""Trainings whose rows and collators draw random numbers, stopped and gone on with: what a resumed epoch is made of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.layer.guards import loops

BATCHES = 5


class Numbers(Dataset[float]):
    """Twenty numbers, each with noise of Python's and NumPy's."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, place: int) -> float:
        return place + 0.01 * random.random() + 0.001 * float(numpy.random.rand())


class Stream(IterableDataset[float]):
    """The same one after the other."""

    def __iter__(self) -> Iterator[float]:
        return (Numbers()[place] for place in range(4 * BATCHES))


def noisy(rows: list[float]) -> torch.Tensor:
    """A collator with noise of torch's."""
    return torch.tensor(rows, dtype=torch.float32) + 0.1 * torch.rand(len(rows))


@dataclass(frozen=True)
class Loop:
    """A bare Accelerate loop: its sampler, and how its script leaves out what was done."""

    seedable: bool = False
    generator: bool = False
    """The loader is given a generator of its own."""
    skips: bool = True
    """skip_first_batches; or the script counts batches and goes past them."""
    stream: bool = False
    workers: int = 0
    epochs: int = 4

    def run(self, folder: Path, save_at: tuple[int, int] | None, resume_at: tuple[int, int] | None) -> list[Any]:
        """What each step saw: epoch, number, batch, and a number drawn on the CPU as a dropout there draws it."""
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        seed_all(99 if resume_at else 5)
        accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=self.seedable, data_seed=3)
        )
        data: dict[str, Any] = {"dataset": Stream()} if self.stream else {"dataset": Numbers(), "shuffle": True}
        own = torch.Generator().manual_seed(1) if self.generator else None
        loader = accelerator.prepare(
            DataLoader(**data, batch_size=4, collate_fn=noisy, generator=own, num_workers=self.workers)
        )
        if resume_at:
            accelerator.load_state(folder)
        seen = []
        begun, done = resume_at or (0, 0)
        for epoch in range(begun, self.epochs):
            left_out = done if epoch == begun else 0
            skipped = left_out if self.skips else 0
            rest = accelerator.skip_first_batches(loader, skipped) if skipped else loader
            for number, batch in enumerate(rest, skipped):
                if number < left_out:
                    continue
                seen.append((epoch, number, batch.tolist(), torch.rand(1).item()))
                if (epoch, number + 1) == save_at:
                    accelerator.save_state(folder)
        return seen

    def goes_on(self, folder: Path, epoch: int, batches: int) -> bool:
        """Whether a run that goes on from there sees what the unbroken one sees."""
        whole = self.run(folder, (epoch, batches), None)
        rest = self.run(folder, None, (epoch, batches) if batches < BATCHES else (epoch + 1, 0))
        return rest == whole[epoch * BATCHES + batches :]


def seed_all(seed: int) -> None:
    """Python's, NumPy's and torch's generators."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def masked(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator that hides some words, as that of a masked language model does."""
    from transformers import default_data_collator

    batch: dict[str, torch.Tensor] = default_data_collator(rows)
    batch["input_ids"][torch.rand(batch["input_ids"].shape) < 0.3] = 2
    batch["input_ids"][0, 0] = int(numpy.random.randint(1, loops.WORDS))
    return batch


def trainer_goes_on(folder: Path, **settings: Any) -> bool:
    """Whether a Trainer with that collator, gone on from within its second epoch, has the unbroken run's weights."""
    found = []
    for checkpoint in (None, folder / "run" / "checkpoint-5"):
        run = loops.trainer(
            folder / "run", model=loops.bert(0.3), num_train_epochs=3, save_strategy="steps", save_steps=5, **settings
        )
        run.data_collator = masked
        torch.rand(3 if checkpoint else 1), numpy.random.rand(3 if checkpoint else 1)
        run.train(resume_from_checkpoint=checkpoint and str(checkpoint))
        found.append(loops.weights(run.model))
    return loops.same(*found)


def masked_trainer(folder: Path) -> bool:
    """The fault as users of Trainer meet it."""
    return trainer_goes_on(folder)


def shuffled_accelerator(folder: Path) -> bool:
    """The fault as users of Accelerate meet it, with the sampler that DataLoader(shuffle=True) makes."""
    return Loop().goes_on(folder, 1, 3)


def seeded_accelerator(folder: Path) -> bool:
    """Epochs of a seeded sampler in a script that, as Accelerate's examples, never calls set_epoch."""
    return Loop(seedable=True).goes_on(folder, 1, 5)
