"""Trains one of two small models, ten times on one batch, that need operators Metal lacks; a line of JSON a device.

python models.py ctc|pool OUTPUT_DIR mps|cpu ...
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments, set_seed

from hf_mps.layer.integrations.trainer_logs import of_training
from hf_mps.metal import fallback


class Called(TorchDispatchMode):
    """The names of all operators that a training calls, without asking the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def ctc(device: str) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """Speech recognition: wav2vec 2.0 with a CTC head on noise."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        vocab_size=12, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False, ctc_loss_reduction="mean",
    )  # fmt: skip
    rows = [{"input_values": torch.randn(800), "labels": torch.randint(1, 12, (5,))} for _ in range(4)]
    return Wav2Vec2ForCTC(config), rows


class Pool(torch.nn.Module):
    """A 3-D convolution under an adaptive max pool."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv3d(1, 4, 3, padding=1), torch.nn.Tanh(), torch.nn.AdaptiveMaxPool3d(2), torch.nn.Flatten(),
            torch.nn.Linear(32, 2),
        )  # fmt: skip

    def forward(self, volume: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(volume)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def pool(device: str) -> tuple[torch.nn.Module, list[dict[str, Any]]]:
    """Volumes of 6 by 6 by 6 in two classes."""
    return Pool(), [{"volume": torch.randn(1, 6, 6, 6), "labels": torch.tensor(n % 2)} for n in range(4)]


def train(name: str, folder: str, device: str) -> None:
    """Train ten steps and print losses, the ledger, all operators called and the log's keys."""
    before = {entry.operator: entry.calls for entry in fallback.report().operators}
    set_seed(0)
    called = Called()
    with called:
        model, rows = {"ctc": ctc, "pool": pool}[name](device)
        arguments = TrainingArguments(
            output_dir=folder, max_steps=10, logging_steps=1, per_device_train_batch_size=4, learning_rate=5e-3,
            use_cpu=device == "cpu", report_to=[], save_strategy="no", remove_unused_columns=False, disable_tqdm=True,
            optim="adamw_torch", seed=0,
        )  # fmt: skip
        trainer = Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "device": trainer.args.device.type,
        "losses": [entry["loss"] for entry in logs],
        "fallback_seconds": [entry.get("fallback_seconds") for entry in logs],
        "called": sorted(called.names),
        "ledger": [
            entry.operator for entry in fallback.report().operators if entry.calls > before.get(entry.operator, 0)
        ],
    }
    if device == "mps":
        training = of_training(trainer)
        result["for results.json"] = training.as_dict()["operators"] if training else None
    print(json.dumps(result))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for each in sys.argv[3:]:
        train(sys.argv[1], sys.argv[2], each)
