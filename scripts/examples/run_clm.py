"""Train a language model to continue text, with the Trainer.

    python scripts/examples/run_clm.py --model_name_or_path ../shared/data/models/stories260K --do_train --do_eval \
        --block_size 128 --output_dir runs/clm

Files of your own: --train_file and --validation_file (txt, or csv and json with a column text).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

import sources
from datasets import DatasetDict
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model to train."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "A folder or a name on the hub."})


@dataclass
class DataTrainingArguments:
    """Which text, and in blocks of which length."""

    train_file: str | None = field(default=None, metadata={"help": "A txt, csv or json file."})
    validation_file: str | None = field(default=None, metadata={"help": "A txt, csv or json file."})
    block_size: int = field(default=128, metadata={"help": "The text is cut into blocks of so many tokens."})
    max_train_samples: int | None = field(default=None, metadata={"help": "The first lines alone."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "The first lines alone."})


def build(model_args: ModelArguments, lines: list[str], length: int):
    """The tokenizer and the model: those that are named, or a small pair made for this text."""
    if model_args.model_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
        return tokenizer, AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    tokenizer = sources.word_tokenizer(lines)
    size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    small = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=max(length, 512), **size)
    small.pad_token_id, small.bos_token_id, small.eos_token_id = 0, 2, 3
    return tokenizer, AutoModelForCausalLM.from_config(small)


def blocks(rows: DatasetDict, tokenizer, length: int) -> DatasetDict:
    """The text as blocks of `length` tokens, each its own label; the rest at the end of a batch is left out."""

    def convert(batch: dict) -> dict:
        lines = tokenizer([line for line in batch["text"] if line.strip()])["input_ids"]
        stream = [token for line in lines for token in line]
        cut = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
        return {
            "input_ids": cut,
            "attention_mask": [[1] * length for _ in cut],
            "labels": [list(block) for block in cut],
        }

    return rows.map(convert, batched=True, remove_columns=rows["train"].column_names)


def main() -> None:
    """Train, evaluate and save, as the command line says."""
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logger.warning("Device: %s", training_args.device)
    set_seed(training_args.seed)

    rows = sources.text(data_args.train_file, data_args.validation_file)
    for split, most in (("train", data_args.max_train_samples), ("validation", data_args.max_eval_samples)):
        if most is not None:
            rows[split] = rows[split].select(range(min(len(rows[split]), most)))
    tokenizer, model = build(model_args, rows["train"]["text"], data_args.block_size)
    ready = blocks(rows, tokenizer, data_args.block_size)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=ready["train"] if training_args.do_train else None,
        eval_dataset=ready["validation"] if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        metrics = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint).metrics
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["perplexity"] = math.exp(min(metrics["eval_loss"], 700))
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
