"""Fine-tune a model on sentences or pairs of sentences with a label, with the Trainer.

    python scripts/examples/run_glue.py --task_name mrpc --do_train --do_eval --max_seq_length 128 \
        --per_device_train_batch_size 32 --learning_rate 2e-5 --num_train_epochs 3 --output_dir runs/mrpc

Files of your own: --train_file and --validation_file (csv or json; columns: one or two of text, and label).
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import sources
import transformers
from datasets import DatasetDict
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    """Which model to fine-tune."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "A folder or a name on the hub."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where downloaded models are kept."})


@dataclass
class DataTrainingArguments:
    """Which data, and how much of it."""

    task_name: str = field(default="mrpc", metadata={"help": "A task of GLUE: cola, mrpc, sst2, stsb, …"})
    train_file: str | None = field(default=None, metadata={"help": "A csv or json file."})
    validation_file: str | None = field(default=None, metadata={"help": "A csv or json file."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer inputs are cut off there."})
    pad_to_max_length: bool = field(default=False, metadata={"help": "One shape for every batch."})
    overwrite_cache: bool = field(default=False, metadata={"help": "Tokenize again."})
    max_train_samples: int | None = field(default=None, metadata={"help": "The first rows alone."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "The first rows alone."})


def build(model_args: ModelArguments, rows: DatasetDict, columns: list[str], config: dict):
    """The tokenizer and the model: those that are named, or a small pair made for these rows."""
    if model_args.model_name_or_path is None:
        texts = (text for column in columns for text in rows["train"][column])
        tokenizer = sources.word_tokenizer(texts, pairs=True)
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        small = BertConfig(vocab_size=len(tokenizer), **size, **config)
        return tokenizer, AutoModelForSequenceClassification.from_config(small)
    where = {"cache_dir": model_args.cache_dir}
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, **where)
    full = AutoConfig.from_pretrained(model_args.model_name_or_path, **config, **where)
    model = AutoModelForSequenceClassification.from_pretrained(model_args.model_name_or_path, config=full, **where)
    return tokenizer, model


def features(
    rows: DatasetDict, tokenizer, columns: list[str], ids: dict, data_args: DataTrainingArguments
) -> DatasetDict:
    """The rows as token ids and labels; without `ids` a label is a number to come near to."""

    def convert(batch: dict) -> dict:
        padding = "max_length" if data_args.pad_to_max_length else False
        texts = (batch[column] for column in columns)
        found = tokenizer(*texts, padding=padding, max_length=data_args.max_seq_length, truncation=True)
        found["labels"] = [ids[label] for label in batch["label"]] if ids else batch["label"]
        return found

    cached = not data_args.overwrite_cache
    ready = rows.map(convert, batched=True, remove_columns=rows["train"].column_names, load_from_cache_file=cached)
    for split, most in (("train", data_args.max_train_samples), ("validation", data_args.max_eval_samples)):
        if most is not None:
            ready[split] = ready[split].select(range(min(len(ready[split]), most)))
    return ready


def score(prediction: EvalPrediction, labels: int) -> dict[str, float]:
    """Accuracy and F1 of so many labels, the mean squared error where there are none."""
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    if not labels:
        return {"mse": float(np.mean((np.squeeze(logits) - prediction.label_ids) ** 2))}
    best = np.argmax(logits, axis=1)
    average = "binary" if labels == 2 else "macro"
    f1 = f1_score(prediction.label_ids, best, average=average, zero_division=0)
    return {"accuracy": float(accuracy_score(prediction.label_ids, best)), "f1": float(f1)}


def last_checkpoint(training_args: TrainingArguments) -> str | None:
    """The checkpoint to go on from: the one that is named, or the last in the output folder."""
    if training_args.resume_from_checkpoint is not None:
        return training_args.resume_from_checkpoint
    if getattr(training_args, "overwrite_output_dir", False) or not Path(training_args.output_dir).is_dir():
        return None
    found = get_last_checkpoint(training_args.output_dir)
    if found is not None:
        logger.info("Going on from %s; another --output_dir begins anew.", found)
    return found


def parsed() -> tuple[ModelArguments, DataTrainingArguments, TrainingArguments]:
    """What the command line says, or the JSON file that it names; logging and seed are set as it says."""
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        groups = parser.parse_json_file(Path(sys.argv[1]).resolve())
    else:
        groups = parser.parse_args_into_dataclasses()
    training_args = groups[2]
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logger.setLevel(training_args.get_process_log_level())
    transformers.utils.logging.set_verbosity(training_args.get_process_log_level())
    logger.warning("Device: %s, fp16: %s, bf16: %s", training_args.device, training_args.fp16, training_args.bf16)
    set_seed(training_args.seed)
    return groups


def main() -> None:
    """Train, evaluate and save, as the command line says."""
    model_args, data_args, training_args = parsed()
    rows = sources.sentences(data_args.task_name, data_args.train_file, data_args.validation_file)
    columns = sources.sentence_columns(rows["train"])
    regression = rows["train"].features["label"].dtype.startswith("float")
    names = [] if regression else sorted(set(rows["train"]["label"]))
    ids = {name: number for number, name in enumerate(names)}
    config = {"num_labels": 1, "problem_type": "regression"} if regression else {"num_labels": len(names)}
    tokenizer, model = build(model_args, rows, columns, config)
    if not regression:
        model.config.label2id = {str(name): number for name, number in ids.items()}
        model.config.id2label = {number: str(name) for name, number in ids.items()}
    with training_args.main_process_first(desc="tokenization"):
        ready = features(rows, tokenizer, columns, ids, data_args)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=ready["train"] if training_args.do_train else None,
        eval_dataset=ready["validation"] if training_args.do_eval else None,
        compute_metrics=lambda prediction: score(prediction, len(names)),
        processing_class=tokenizer,
        data_collator=default_data_collator if data_args.pad_to_max_length else DataCollatorWithPadding(tokenizer),
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=last_checkpoint(training_args))
        metrics = {**result.metrics, "train_samples": len(ready["train"])}
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = {**trainer.evaluate(), "eval_samples": len(ready["validation"])}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
