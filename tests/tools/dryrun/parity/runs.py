"""A few steps of a plain PyTorch model through Trainer, on the CPU and on the device, held against each other."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments

from hf_mps.finetune.run.trainer import recipe_trainer
from hf_mps.tools.dryrun.modules import ModuleTracker
from hf_mps.tools.dryrun.parity.compare import Parity, compare, once_or_twice
from hf_mps.tools.dryrun.parity.trace import trace_steps as trace
from hf_mps.tools.dryrun.step import TrainingStep


class Classifier(nn.Module):
    """An embedding, a norm, a layer and a head over the mean of the tokens; `frozen` keeps the embedding as it is."""

    def __init__(self, frozen: bool = False, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(40, width)
        self.norm = nn.LayerNorm(width)
        self.layer = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(width, 2)
        self.words.requires_grad_(not frozen)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.layer(self.norm(self.words(input_ids)))
        logits = self.head(found.mean(1).float() if found.dtype != self.head.weight.dtype else found.mean(1))
        return {"loss": nn.functional.cross_entropy(logits.float(), labels), "logits": logits}


def batches(*shapes: tuple[int, int]) -> list[dict[str, torch.Tensor]]:
    """A batch of token ids and labels for each (rows, tokens)."""
    draw = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(1, 40, shape, generator=draw),
            "labels": torch.randint(0, 2, shape[:1], generator=draw),
        }
        for shape in shapes
    ]


def held(model: nn.Module, given: list[Any], folder: Path, precision: str = "fp32", **settings: Any) -> Parity:
    """What parity finds of `model` over the batches `given`, a step each."""
    arguments = {"output_dir": str(folder), "report_to": "none", "optim": "adamw_torch", "learning_rate": 1e-2}

    def make(device: str) -> TrainingStep:
        own = TrainingArguments(**(arguments | settings), use_cpu=device == "cpu", max_steps=100, disable_tqdm=True)
        trainer = recipe_trainer()(model=copy.deepcopy(model), args=own, train_dataset=[0])
        return TrainingStep(trainer, given, ModuleTracker())

    wanted = trace(lambda: make("cpu"), "cpu", len(given), 7)
    found, again = once_or_twice(wanted, lambda: trace(lambda: make("mps"), "mps", len(given), 7))
    return compare(wanted, found, precision, again)
