"""What each rank of `torchrun` trains in tests/finetune/run/test_links.py, and prints as JSON on the main one.

Each way of a recipe's `link` section trains the same small model on the same rows; what is printed is the weights' mean
distance from those of plain DistributedDataParallel, and by how much the ranks differ at the end and in between.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from hf_mps.core.choice import Choice
from hf_mps.finetune.recipe.schema import LinkSection
from hf_mps.finetune.run import links

STEPS = 12


class Net(torch.nn.Module):
    """Two layers, whose loss is the mean over the rows of a batch; the first bias is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(24, 32), torch.nn.Linear(32, 1)
        self.first.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.second(torch.tanh(self.first(x))).squeeze(-1)
        return {"loss": torch.nn.functional.mse_loss(out, labels), "logits": out}


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


def train(folder: Path, **said: Any) -> tuple[torch.Tensor, Watch, Any]:
    set_seed(1)
    draw = torch.Generator().manual_seed(3)
    rows = [{"x": torch.randn(24, generator=draw), "labels": torch.randn((), generator=draw)} for _ in range(96)]
    args = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=4, learning_rate=1e-2, save_strategy="steps",
        save_steps=5, report_to="none", disable_tqdm=True, use_cpu=True, logging_steps=100, optim="sgd",
    )  # fmt: skip
    model = Net()
    choices: dict[str, Choice[Any]] = {"steps": Choice(STEPS, "")}
    choices |= links.decide(LinkSection(**said), {}, model, links.World.here())
    watch = Watch()
    trainer = Trainer(model, args, train_dataset=rows)
    links.compress(trainer, choices)
    links.step_locally(trainer, choices)
    trainer.add_callback(watch)
    trainer.train()
    links.measure(trainer, choices)
    return flat(model), watch, choices


def main(folder: Path) -> None:
    plain, _, _ = train(folder / "plain")
    found = {}
    for name, said in {
        "fp16": {"compression": "fp16"},
        "bf16": {"compression": "bf16"},
        "powersgd": {"compression": "powersgd"},
        "local": {"local_steps": 4},
    }.items():
        weights, watch, _ = train(folder / name, **said)
        off = float((weights - plain).norm() / plain.norm())
        found[name] = {"off": off, "apart": watch.apart, "places": len(watch.places)}
    if distributed.get_rank() == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
