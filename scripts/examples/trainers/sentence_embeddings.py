"""sentence-transformers 6: SentenceTransformerTrainer with pairs and losses in the batch."""

import sys
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from tiny import bert

torch.manual_seed(0)
with tempfile.TemporaryDirectory() as folder:
    model = SentenceTransformer(str(bert(folder)), device=sys.argv[1])
    words = [f"word{number}" for number in range(64)]
    rows = Dataset.from_dict({"anchor": words, "positive": [f"{each} again" for each in words]})
    arguments = SentenceTransformerTrainingArguments(
        folder, max_steps=12, per_device_train_batch_size=8, logging_steps=2, learning_rate=1e-3,
        use_cpu=sys.argv[1] == "cpu", report_to="none", save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model, arguments, rows, loss=MultipleNegativesRankingLoss(model))
    trainer.train()
print("losses", [entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
