"""A tiny training, plain or with its steps recorded, on the CPU with a recorder that runs the work anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_mps.finetune.cuda_graphs.graphs import Graphs
from hf_mps.finetune.cuda_graphs.steps import StepCapture, with_capture
from hf_mps.finetune.run.trainer import recipe_trainer

WIDTHS = (8, 12, 8, 12, 16)
BATCH = 4


class Rerun:
    """In CUDA's place: recording runs nothing, and a replay runs the body on what lies in its inputs.

    A body returns a loss, and perhaps a norm: both are a number.
    """

    def __init__(self) -> None:
        self.recordings = 0

    def __call__(self, body: Callable[[], tuple[Tensor | None, ...]]) -> Any:
        self.recordings += 1
        outputs = (torch.full((), torch.nan), torch.full((), torch.nan))

        def replay() -> None:
            for place, value in zip(outputs, body(), strict=False):
                if value is not None:
                    place.copy_(value.detach())

        return replay, outputs


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of random tokens: each batch of BATCH has one of WIDTHS, the last one two rows."""

    def __init__(self, batches: int = 6) -> None:
        draw = torch.Generator().manual_seed(3)
        self.rows: list[dict[str, Any]] = []
        for batch in range(batches):
            width = WIDTHS[batch % len(WIDTHS)]
            for _ in range(BATCH if batch < batches - 1 else 2):
                ids = torch.randint(5, 50, (width,), generator=draw)
                self.rows.append({"input_ids": ids, "labels": int(ids[0] % 2)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self.rows[row]


def model() -> Any:
    """A two-layer BERT with dropout, the same whenever it is made."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**sizes, intermediate_size=64, max_position_embeddings=32))


def trainer(folder: Path, made: Any = None, *, kind: type[Any] | None = None, cuda: bool = False, **said: Any) -> Any:
    """A recipe's Trainer over Rows in their order, three epochs with a line a step."""
    from torch.utils.data import SequentialSampler
    from transformers import TrainingArguments

    settings: dict[str, Any] = {"learning_rate": 1e-3, "num_train_epochs": 3, "logging_steps": 1, "seed": 1}
    settings |= {"per_device_train_batch_size": BATCH, "use_cpu": not cuda, "report_to": "none", "disable_tqdm": True}
    settings |= {"save_strategy": "no", "optim": "adamw_torch_fused", "logging_nan_inf_filter": False, **said}
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    done = recipe_trainer(kind)(model=made or model(), args=arguments, train_dataset=Rows())
    done.train_sampler = lambda: SequentialSampler(done.train_dataset)
    return done


def captured(made: Any, *, recorder: Any = None, **settings: Any) -> StepCapture:
    """Let the trainer `made` record its steps, and return the account of it."""
    account = StepCapture(made, Graphs(recorder), **settings)
    with_capture(made, account)
    return account


def history(made: Any) -> dict[str, list[float]]:
    """Losses, gradient norms and learning rates of a training, by step."""
    entries = [entry for entry in made.state.log_history if "loss" in entry]
    return {name: [entry[name] for entry in entries] for name in ("loss", "grad_norm", "learning_rate")}


def weights(made: Any) -> dict[str, Tensor]:
    """The weights on the CPU."""
    return {name: weight.detach().cpu().clone() for name, weight in made.model.state_dict().items()}
