"""Training in small, through each of the loops that people use, always from the same weights over the same rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_mps.layer.guards.platform.cuda import ERRORS, LAYOUT

ROWS, LENGTH, WORDS = 32, 6, 40


def bert(dropout: float = 0.0, **settings: Any) -> Any:
    """A BERT of a few thousand weights on the CPU, always the same."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **settings,
    )
    return BertForSequenceClassification(config)


class Diverging(nn.Module):
    """A model whose loss is no number in one of its batches; its weights, trained on that, are none either."""

    def __init__(self, batch: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.batch = batch
        self.batches = 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.batches += 1
        loss = (self.weight - 1).square().sum()
        return {"loss": loss * math.nan if self.batches == self.batch else loss, "logits": self.weight[None]}


def rows() -> list[dict[str, Any]]:
    """Token ids and labels, always the same; no id is 0."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(1, WORDS, (ROWS, LENGTH), generator=draw)
    return [{"input_ids": each.tolist(), "labels": int(each[0]) % 2} for each in ids]


def trainer(folder: Path, model: Any = None, callbacks: Any = None, data: Any = None, **settings: Any) -> Any:
    """transformers' Trainer over `rows`, four steps of eight."""
    from transformers import Trainer, TrainingArguments

    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 1,
    }
    model = bert() if model is None else model
    data = rows() if data is None else data
    return Trainer(
        model=model, args=TrainingArguments(**(arguments | settings)), train_dataset=data, callbacks=callbacks
    )


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of all weights, on the CPU."""
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def trained(folder: Path, **settings: Any) -> list[Tensor]:
    """The weights after a run of `trainer`."""
    run = trainer(folder, **settings)
    run.train()
    return weights(run.model)


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether two lists of weights are equal to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def close(one: list[Tensor], other: list[Tensor], tolerance: float = 1e-4) -> bool:
    """Whether two lists of weights agree up to rounding."""
    return all(torch.allclose(a, b, atol=tolerance, rtol=tolerance) for a, b in zip(one, other, strict=True))


def descend(loss: Callable[[], Tensor], optimizer: torch.optim.Optimizer, steps: int) -> None:
    """A plain loop of as many steps."""
    for _ in range(steps):
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def new_accelerator(**settings: Any) -> Any:
    """An Accelerator in a state of its own."""
    from accelerate import Accelerator

    forget_accelerators()
    return Accelerator(**settings)


def forget_accelerators() -> None:
    """Let the next Accelerator of this process choose as the first one did."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    PartialState._reset_state()


@contextmanager
def own_compiler() -> Iterator[None]:
    """torch's compiler with its switches as nobody has touched them; what it compiled, and they, are forgotten."""
    import torch._dynamo.config
    import torch._inductor.config

    before = (torch._inductor.config.layout_optimization, torch._dynamo.config.suppress_errors)
    with pytest.MonkeyPatch.context() as environment:
        for name in (LAYOUT, ERRORS, "ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_DYNAMO_MODE"):
            environment.setenv(name, "no")  # older TrainingArguments set the last two, and leave them
            environment.delenv(name)
        yield
    torch._inductor.config.layout_optimization, torch._dynamo.config.suppress_errors = before
    torch._dynamo.reset()


@contextmanager
def stock() -> Iterator[None]:
    """Without any guard or sentinel."""
    from hf_mps.layer import guards

    with guards.suspended(), guards.suspended(kind="sentinel"):
        yield


def batches() -> Any:
    """A DataLoader over `rows`, in their order."""
    from transformers import default_data_collator

    return torch.utils.data.DataLoader(rows(), batch_size=8, collate_fn=default_data_collator)


def accelerated(model: Any = None, accelerator: Any = None, **settings: Any) -> list[Tensor]:
    """The weights after an epoch of a bare Accelerate loop."""
    accelerator = accelerator or new_accelerator()
    model = bert() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)
    model, optimizer, loader = accelerator.prepare(model, optimizer, batches())
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
    return weights(model)
