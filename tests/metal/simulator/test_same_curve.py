"""The stock Trainer learns the same on the simulated device as on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

STEPS = 50


def losses(output: Path, *, use_cpu: bool) -> list[float]:
    """Train a small BERT without dropout for 50 steps and return the loss of each."""
    torch.manual_seed(7)
    config = BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForSequenceClassification(config)
    rows = torch.randint(5, 200, (STEPS * 8, 16), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": int(row[0] > row[1])} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(output),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=use_cpu,
        seed=3,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    assert arguments.device.type == ("cpu" if use_cpu else "mps")
    assert next(model.parameters()).device.type == arguments.device.type
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
def test_the_same_seed_gives_the_cpu_loss_curve_over_fifty_steps_to_1e_4(tmp_path: Path) -> None:
    here = losses(tmp_path / "mps", use_cpu=False)
    there = losses(tmp_path / "cpu", use_cpu=True)
    assert len(here) == len(there) == STEPS
    assert min(here) < here[0] - 0.05, "the model learned nothing, so agreement would prove nothing"
    assert max(abs(a - b) for a, b in zip(here, there, strict=True)) < 1e-4
