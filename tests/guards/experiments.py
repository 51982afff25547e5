"""For each hazard what a person would see: functions that return whether training came out right.

Each is run with the hazard on, once with its guard and once without.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from tests.guards import loops

Experiment = Callable[[Path], bool]


def checkpointed_gradients(folder: Path) -> bool:
    """Gradients of a BERT with dropout are the same with and without gradient checkpointing."""
    found = []
    for checkpointing in (False, True):
        model = loops.bert(dropout=0.5).to("mps").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(1)
        ids = torch.arange(1, 13).view(2, 6).to("mps")
        model(input_ids=ids, labels=torch.tensor([0, 1]).to("mps")).loss.backward()
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
    return loops.same(*found)


def checkpointed_trainer(folder: Path) -> bool:
    """Trainer reaches the same weights with and without gradient checkpointing, dropout on."""
    plain, checkpointing = loops.bert(0.3), loops.bert(0.3)
    checkpointing.gradient_checkpointing_enable()
    return loops.same(*(loops.trained(folder, model=model, max_steps=2) for model in (plain, checkpointing)))


def reentrant_checkpoint(folder: Path) -> bool:
    """The older, reentrant form replays dropout as well."""
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to("mps")
    found = []
    for reentrant in (None, True):
        x = torch.ones(4, 8, device="mps", requires_grad=True)
        torch.manual_seed(2)
        y = layer(x) if reentrant is None else torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
        y.sum().backward()
        assert x.grad is not None
        found.append([x.grad.cpu()])
    return loops.same(*found)


def resumed_trainer(folder: Path) -> bool:
    """A Trainer run resumed from its checkpoint has, to the last bit, the weights of one that was not stopped."""
    whole = loops.trained(
        folder / "whole", model=loops.bert(0.3), num_train_epochs=2, save_steps=3, save_strategy="steps"
    )
    torch.rand(5, device="mps")
    rest = loops.trainer(folder / "rest", model=loops.bert(0.3), num_train_epochs=2)
    rest.train(resume_from_checkpoint=str(folder / "whole" / "checkpoint-3"))
    return loops.same(whole, loops.weights(rest.model))


def resumed_accelerator(folder: Path) -> bool:
    """The same for accelerator.save_state and load_state."""
    found = []
    for again in (False, True):
        accelerator = loops.new_accelerator()
        model = loops.bert(dropout=0.3)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        torch.manual_seed(11 if again else 7)
        for step, batch in enumerate(loops.batches()):
            if step == 2:
                accelerator.load_state(folder) if again else accelerator.save_state(folder)
            if step < 2 and again:
                continue
            moved = {name: tensor.to("mps") for name, tensor in batch.items()}
            accelerator.backward(model.train()(**moved).loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loops.weights(model))
    return loops.same(*found)


def released_sources(folder: Path) -> bool:
    """pytorch#189690's own program: three numbers, each released after a non_blocking copy."""
    copies = []
    for number in (1.0, 2.0, 3.0):
        source = torch.full((1,), number)
        copies.append(source.to("mps", non_blocking=True))
        del source
    return torch.cat(copies).tolist() == [1.0, 2.0, 3.0]


def released_source_of_copy(folder: Path) -> bool:
    """The same through Tensor.copy_ and through Module.to."""
    target = torch.empty(2, device="mps")
    target.copy_(torch.ones(2), non_blocking=True)
    layer = nn.Linear(2, 2)
    expected = layer.weight.tolist()
    layer.to("mps", non_blocking=True)
    return target.tolist() == [1.0, 1.0] and layer.weight.tolist() == expected


def non_blocking_accelerator(folder: Path) -> bool:
    """An Accelerate loop whose loader moves batches with non_blocking=True trains as one that does not."""
    from accelerate.utils import DataLoaderConfiguration

    fast = loops.new_accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    found = loops.accelerated(accelerator=fast)
    return loops.same(found, loops.accelerated())


def non_blocking_trainer(folder: Path) -> bool:
    """The same for Trainer with accelerator_config={"non_blocking": True}."""
    found = loops.trained(folder, accelerator_config={"non_blocking": True})
    return loops.same(found, loops.trained(folder))


EXPERIMENTS: dict[str, tuple[Experiment, ...]] = {
    "checkpoint-rng": (checkpointed_gradients, reentrant_checkpoint, checkpointed_trainer),
    "resume-rng": (resumed_trainer, resumed_accelerator),
    "non-blocking": (released_sources, released_source_of_copy, non_blocking_accelerator, non_blocking_trainer),
}
