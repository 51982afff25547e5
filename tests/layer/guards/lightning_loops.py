"""Training in small through Lightning, under either of its names."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layer.guards import loops
from tests.layer.guards.resume_loops import masked

NAMES = ("lightning.pytorch", "pytorch_lightning")


def library(name: str = NAMES[0]) -> Any:
    """The module `lightning.pytorch` or `pytorch_lightning`."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # Lightning sets it when imported, and leaves it
        return importlib.import_module(name)


def module(pl: Any, model: nn.Module | None = None, batch_size: int = 8) -> Any:
    """A BERT with dropout as a LightningModule, with a loader over `loops.rows`: shuffled, words hidden at random."""

    class Classifier(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model or loops.bert(dropout=0.3)
            self.batch_size = batch_size

        def training_step(self, batch: Any, _: int) -> Tensor:
            return self.model(**batch).loss

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                loops.rows(),  # type: ignore[arg-type]
                self.batch_size,
                shuffle=True,
                collate_fn=masked,
            )

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Classifier()


def trainer(pl: Any, folder: Path, **settings: Any) -> Any:
    """A Trainer that says little and writes nothing by itself."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(default_root_dir=folder, **(quiet | settings))


def resumed(name: str, folder: Path, step: int) -> bool:
    """Three epochs of four steps, and a run that goes on from the checkpoint of `step`: the same weights to the bit."""
    pl = library(name)
    torch.manual_seed(1)
    saving = pl.callbacks.ModelCheckpoint(folder, save_top_k=-1, every_n_train_steps=2)
    whole = module(pl)
    trainer(pl, folder, max_epochs=3, enable_checkpointing=True, callbacks=[saving]).fit(whole)
    torch.manual_seed(99)
    torch.rand(5, device="mps")
    rest = module(pl)
    (found,) = folder.glob(f"*-step={step}.ckpt")
    trainer(pl, folder, max_epochs=3).fit(rest, ckpt_path=str(found))
    return loops.same(loops.weights(whole), loops.weights(rest))
