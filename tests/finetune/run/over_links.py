"""What each rank of `torchrun` trains in tests/finetune/run/test_links.py, and prints as JSON on the main one.

Each way of a recipe's `link` section trains the same small model on the same rows; what is printed is by how much its
weights differ from those of one process that saw the same steps, and by how much the ranks' differ after each step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator, set_seed

from hf_mps.core.choice import Choice
from hf_mps.finetune.recipe.schema import LinkSection
from hf_mps.finetune.run import links, shares

STEPS, RATE = 12, 0.05


class Net(torch.nn.Module):
    """Two layers, whose loss is the mean over the labels of a batch: one a row, or some for each; a bias is frozen."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 32), torch.nn.Linear(32, 5)
        self.first.bias.requires_grad_(False)
        self.tokens = tokens
        self.seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.append((x, labels))
        out = self.second(torch.tanh(self.first(x)))
        return {"loss": torch.nn.functional.cross_entropy(out.flatten(0, -2), labels.flatten()), "logits": out}


def rows(tokens: bool) -> list[dict[str, torch.Tensor]]:
    """Rows of a vector and its class, or of six with a class for some of them."""
    draw = torch.Generator().manual_seed(3)
    many = []
    for at in range(96):
        x, labels = torch.randn(6, 24, generator=draw), torch.randint(0, 5, (6,), generator=draw)
        labels[1 + at % 5 :] = -100
        many.append({"x": x, "labels": labels} if tokens else {"x": x[0], "labels": labels[0]})
    return many


def replayed(model: Net) -> torch.Tensor:
    """The weights that one process has after the steps that the ranks' models saw, each with the rows of all ranks."""
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, model.seen[-STEPS:])
    set_seed(1)
    alone = Net(model.tokens)
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    for parts in zip(*every, strict=True):
        x, labels = (torch.cat([part[at] for part in parts]) for at in (0, 1))
        alone(x, labels)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(alone)


class Watch(TrainerCallback):
    """Notes after each step how far the ranks' weights are apart, and at each checkpoint what it would store."""

    def __init__(self) -> None:
        self.apart: list[float] = []
        self.places: set[int] = set()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.apart.append(apart(model))
        self.places.add(model.first.weight.data_ptr())

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        assert apart(model) == 0, "a checkpoint of one rank's own weights"


def flat(model: Any) -> torch.Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()]).clone()


def apart(model: Any) -> float:
    """The greatest difference between the ranks' weights."""
    mine = flat(model)
    mean = mine.clone()
    distributed.all_reduce(mean)
    gap = (mine - mean / distributed.get_world_size()).abs().max()
    distributed.all_reduce(gap, distributed.ReduceOp.MAX)
    return float(gap) if float(gap) > 1e-7 else 0.0


def train(
    folder: Path, tokens: bool = False, optim: str = "sgd", begun: Path | None = None, **said: Any
) -> dict[str, Any]:
    """Train one way, and return what is to be known of it: of a run that goes on from a checkpoint, its weights."""
    set_seed(1)
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=RATE, save_strategy="steps",
        save_steps=5, report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=100, optim=optim,
        lr_scheduler_type="constant", max_grad_norm=0,
    )  # fmt: skip
    model, data, watch = Net(tokens), rows(tokens), Watch()
    choices: dict[str, Choice[Any]] = {"steps": Choice(STEPS, ""), "batch": Choice(4, "")}
    choices |= links.decide(LinkSection(**said), {}, model, links.World.here())
    trainer = Trainer(model, args, train_dataset=data)
    links.compress(trainer, choices)
    prepared: Any = SimpleNamespace(token_counts=None, at_hand=data, collator=default_data_collator)
    shares.install(trainer, prepared, choices, None)
    links.step_locally(trainer, choices)
    trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=str(begun) if begun is not None else None)
    weights = flat(model)
    if begun is not None:
        return {"weights": weights.tolist()}
    links.measure(trainer, choices)
    kept = (folder / f"checkpoint-{STEPS - 2}").exists()
    return {
        "off": float((weights - replayed(model)).abs().max()),
        "weights": weights.tolist(),
        "apart": watch.apart,
        "places": len(watch.places),
        "sizes": choices[shares.KEY].value if shares.KEY in choices else None,
        "stored": shares._stored(folder / f"checkpoint-{STEPS - 2}", 2, 8) if kept else None,
    }


def main(folder: Path) -> None:
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "fp16": {"compression": "fp16"},
        "bf16": {"compression": "bf16"},
        "powersgd": {"compression": "powersgd"},
        "local": {"local_steps": 4, "optim": "adamw_torch"},
        "shares": {"batches": [6, 2]},
        "shares of tokens": {"batches": [6, 2], "tokens": True},
        "measured": {"batches": "measured"},
    }
    found = {name: train(folder / name, **said) for name, said in ways.items()}
    for name in ("powersgd", "local"):
        begun = folder / name / "checkpoint-5"
        found[f"{name} resumed"] = train(folder / f"{name} resumed", begun=begun, **ways[name])
    if distributed.get_rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
