"""SetFit: a body trained by pairs, then a head, from a few labelled sentences."""

import sys
import tempfile

import torch
from datasets import Dataset
from setfit import SetFitModel, Trainer, TrainingArguments
from tiny import bert

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    model = SetFitModel.from_pretrained(str(bert(folder)), device=sys.argv[1])
    rows = Dataset.from_dict({"text": [f"word{number}" for number in range(16)], "label": [0, 1] * 8})
    arguments = TrainingArguments(
        folder, max_steps=12, batch_size=8, logging_steps=2, body_learning_rate=1e-3, report_to="none"
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    print("losses", [e["embedding_loss"] for e in trainer.st_trainer.state.log_history if "embedding_loss" in e])
