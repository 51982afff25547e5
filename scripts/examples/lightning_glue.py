"""Fine-tune a model on sentences or pairs of sentences with a label, as a Lightning module.

    python scripts/examples/lightning_glue.py --task_name mrpc --output_dir runs/mrpc

Files of your own: --train_file and --validation_file (csv or json; columns: one or two of text, and label).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import lightning as L
import sources
import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, DataCollatorWithPadding


class Classifier(L.LightningModule):
    """A sequence classifier of transformers with its optimizer and its accuracy."""

    def __init__(self, model: torch.nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.model = model
        self.learning_rate = learning_rate
        self.losses: list[float] = []
        self._right: list[torch.Tensor] = []

    def training_step(self, batch: dict, index: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict, index: int) -> None:
        found = self.model(**batch)
        self._right.append(found.logits.argmax(dim=-1) == batch["labels"])
        self.log("val_loss", found.loss, batch_size=len(batch["labels"]))

    def on_validation_epoch_end(self) -> None:
        self.log("val_accuracy", torch.cat(self._right).float().mean(), prog_bar=True)
        self._right.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class Sentences(L.LightningDataModule):
    """The rows of a task as batches."""

    def __init__(self, rows, tokenizer, columns: list[str], ids: dict, batch_size: int, max_length: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self._collate = DataCollatorWithPadding(tokenizer)

        def features(batch: dict) -> dict:
            found = tokenizer(*(batch[column] for column in columns), max_length=max_length, truncation=True)
            found["labels"] = [ids[label] for label in batch["label"]]
            return found

        self._ready = rows.map(features, batched=True, remove_columns=rows["train"].column_names)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self._ready["train"], self.batch_size, shuffle=True, collate_fn=self._collate)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self._ready["validation"], self.batch_size, collate_fn=self._collate)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task_name", default="mrpc", help="a task of GLUE")
    parser.add_argument("--train_file", help="a csv or json file")
    parser.add_argument("--validation_file", help="a csv or json file")
    parser.add_argument("--model_name_or_path", help="a folder or a name on the hub")
    parser.add_argument("--accelerator", default="auto", help="auto, mps, gpu or cpu")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--max_epochs", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=-1, help="overrides --max_epochs")
    parser.add_argument("--ckpt_path", help="a checkpoint to go on from")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", required=True)
    return parser.parse_args()


def build(args: argparse.Namespace, texts, labels: int):
    """The tokenizer and the model: those that are named, or a small pair made for these rows."""
    if args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        return tokenizer, AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, num_labels=labels)
    tokenizer = sources.word_tokenizer(texts, pairs=True)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    small = BertConfig(vocab_size=len(tokenizer), num_labels=labels, **size)
    return tokenizer, AutoModelForSequenceClassification.from_config(small)


def main() -> None:
    """Train, validate and save, as the command line says."""
    args = parse_args()
    L.seed_everything(args.seed)
    rows = sources.sentences(args.task_name, args.train_file, args.validation_file)
    columns = sources.sentence_columns(rows["train"])
    ids = {label: number for number, label in enumerate(sorted(set(rows["train"]["label"])))}
    tokenizer, model = build(args, (text for column in columns for text in rows["train"][column]), len(ids))
    data = Sentences(rows, tokenizer, columns, ids, args.batch_size, args.max_length)

    module = Classifier(model, args.learning_rate)
    trainer = L.Trainer(
        accelerator=args.accelerator,
        max_epochs=args.max_epochs,
        max_steps=args.max_steps,
        default_root_dir=args.output_dir,
        logger=False,
        log_every_n_steps=5,
    )
    print(f"Device: {trainer.strategy.root_device}")
    trainer.fit(module, data, ckpt_path=args.ckpt_path)
    metrics = trainer.validate(module, data, verbose=False)[0]
    print(metrics)

    folder = Path(args.output_dir)
    module.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    everything = {"losses": module.losses, "device": trainer.strategy.root_device.type, **metrics}
    (folder / "all_results.json").write_text(json.dumps(everything), encoding="utf-8")


if __name__ == "__main__":
    main()
