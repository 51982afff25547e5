"""Fine-tune a model on sentences or pairs of sentences with a label, in a loop of one's own with Accelerate.

    python scripts/examples/run_glue_no_trainer.py --task_name mrpc --output_dir runs/mrpc

Files of your own: --train_file and --validation_file (csv or json; columns: one or two of text, and label).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import sources
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.metrics import accuracy_score, f1_score
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    get_scheduler,
)


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task_name", default="mrpc", help="a task of GLUE")
    parser.add_argument("--train_file", help="a csv or json file")
    parser.add_argument("--validation_file", help="a csv or json file")
    parser.add_argument("--model_name_or_path", help="a folder or a name on the hub")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--per_device_train_batch_size", type=int, default=32)
    parser.add_argument("--per_device_eval_batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=5e-5)
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--max_train_steps", type=int, help="overrides --num_train_epochs")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--lr_scheduler_type", default="linear")
    parser.add_argument("--num_warmup_steps", type=int, default=0)
    parser.add_argument("--checkpointing_steps", type=int, help="save the state every so many steps")
    parser.add_argument("--resume_from_checkpoint", help="a folder step_N of an earlier run")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--output_dir", required=True)
    return parser.parse_args()


def build(args: argparse.Namespace, texts, labels: int):
    """The tokenizer and the model: those that are named, or a small pair made for these rows."""
    if args.model_name_or_path is None:
        tokenizer = sources.word_tokenizer(texts, pairs=True)
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        small = BertConfig(vocab_size=len(tokenizer), num_labels=labels, **size)
        return tokenizer, AutoModelForSequenceClassification.from_config(small)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    config = AutoConfig.from_pretrained(args.model_name_or_path, num_labels=labels)
    return tokenizer, AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, config=config)


def loaders(args: argparse.Namespace, rows, tokenizer, columns: list[str], ids: dict) -> tuple[DataLoader, DataLoader]:
    """Batches of the training rows, shuffled, and of the validation rows."""

    def features(batch: dict) -> dict:
        found = tokenizer(*(batch[column] for column in columns), max_length=args.max_length, truncation=True)
        found["labels"] = [ids[label] for label in batch["label"]]
        return found

    ready = rows.map(features, batched=True, remove_columns=rows["train"].column_names)
    collate = DataCollatorWithPadding(tokenizer)
    train = DataLoader(ready["train"], shuffle=True, collate_fn=collate, batch_size=args.per_device_train_batch_size)
    validation = DataLoader(ready["validation"], collate_fn=collate, batch_size=args.per_device_eval_batch_size)
    return train, validation


def evaluate(accelerator: Accelerator, model, batches: DataLoader, labels: int) -> dict[str, float]:
    """Accuracy and F1 on the validation rows."""
    model.eval()
    guesses, truths = [], []
    for batch in batches:
        with torch.no_grad():
            best = model(**batch).logits.argmax(dim=-1)
        best, truth = accelerator.gather_for_metrics((best, batch["labels"]))
        guesses += best.tolist()
        truths += truth.tolist()
    f1 = f1_score(truths, guesses, average="binary" if labels == 2 else "macro", zero_division=0)
    return {"accuracy": float(accuracy_score(truths, guesses)), "f1": float(f1)}


def train(
    accelerator: Accelerator, args: argparse.Namespace, model, optimizer, schedule, batches: DataLoader
) -> list[float]:
    """Train, and return the loss of each step."""
    per_epoch = math.ceil(len(batches) / args.gradient_accumulation_steps)
    steps = args.max_train_steps or args.num_train_epochs * per_epoch
    done = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        done = int(Path(args.resume_from_checkpoint).name.removeprefix("step_"))
    losses: list[float] = []
    while done < steps:
        model.train()
        skipped = (done % per_epoch) * args.gradient_accumulation_steps
        for batch in accelerator.skip_first_batches(batches, skipped) if skipped else batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            done += 1
            losses.append(loss.item())
            if args.checkpointing_steps and done % args.checkpointing_steps == 0:
                accelerator.save_state(str(Path(args.output_dir) / f"step_{done}"))
            if done == steps:
                break
    return losses


def main() -> None:
    """Train, evaluate and save, as the command line says."""
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    accelerator.print(f"Device: {accelerator.device}, mixed precision: {accelerator.mixed_precision}")
    set_seed(args.seed)

    rows = sources.sentences(args.task_name, args.train_file, args.validation_file)
    columns = sources.sentence_columns(rows["train"])
    ids = {label: number for number, label in enumerate(sorted(set(rows["train"]["label"])))}
    tokenizer, model = build(args, (text for column in columns for text in rows["train"][column]), len(ids))
    batches, validation = loaders(args, rows, tokenizer, columns, ids)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
    total = args.max_train_steps or args.num_train_epochs * math.ceil(len(batches) / args.gradient_accumulation_steps)
    schedule = get_scheduler(
        args.lr_scheduler_type, optimizer, num_warmup_steps=args.num_warmup_steps, num_training_steps=total
    )
    model, optimizer, batches, validation, schedule = accelerator.prepare(
        model, optimizer, batches, validation, schedule
    )
    losses = train(accelerator, args, model, optimizer, schedule, batches)
    results = evaluate(accelerator, model, validation, len(ids))
    accelerator.print(results)

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(args.output_dir, is_main_process=accelerator.is_main_process)
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
        everything = {"losses": losses, "device": accelerator.device.type, **results}
        Path(args.output_dir, "all_results.json").write_text(json.dumps(everything), encoding="utf-8")


if __name__ == "__main__":
    main()
