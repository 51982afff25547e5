"""Fine-tune a model to tag words (names of people, places, …), with the Trainer.

    python scripts/examples/run_ner.py --do_train --do_eval --output_dir runs/ner

Files of your own: --train_file and --validation_file (json; columns: tokens, the words, and ner_tags, as many tags).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import sources
from datasets import DatasetDict
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    BertConfig,
    DataCollatorForTokenClassification,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)

logger = logging.getLogger(__name__)
NO_LABEL = -100  # what the loss leaves out


@dataclass
class ModelArguments:
    """Which model to fine-tune."""

    model_name_or_path: str | None = field(default=None, metadata={"help": "A folder or a name on the hub."})


@dataclass
class DataTrainingArguments:
    """Which data, and which of its columns."""

    train_file: str | None = field(default=None, metadata={"help": "A json file."})
    validation_file: str | None = field(default=None, metadata={"help": "A json file."})
    text_column_name: str = field(default="tokens", metadata={"help": "The column of words."})
    label_column_name: str = field(default="ner_tags", metadata={"help": "The column of tags."})
    max_seq_length: int = field(default=128, metadata={"help": "Longer inputs are cut off there."})
    label_all_tokens: bool = field(default=False, metadata={"help": "Tag each piece of a word, not its first alone."})


def build(model_args: ModelArguments, words: list[list[str]], tags: list[str]):
    """The tokenizer and the model: those that are named, or a small pair made for these words."""
    labels = {"id2label": dict(enumerate(tags)), "label2id": {tag: number for number, tag in enumerate(tags)}}
    if model_args.model_name_or_path is None:
        tokenizer = sources.word_tokenizer((" ".join(row) for row in words), pairs=True)
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
        small = BertConfig(vocab_size=len(tokenizer), **size, **labels)
        return tokenizer, AutoModelForTokenClassification.from_config(small)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path, add_prefix_space=True)
    config = AutoConfig.from_pretrained(model_args.model_name_or_path, **labels)
    model = AutoModelForTokenClassification.from_pretrained(model_args.model_name_or_path, config=config)
    return tokenizer, model


def align(tags: list[int], pieces: list[int | None], every: bool) -> list[int]:
    """The tag of each piece of a sentence, given the word it comes from: special tokens have none."""
    found, before = [], None
    for word in pieces:
        found.append(NO_LABEL if word is None or (word == before and not every) else tags[word])
        before = word
    return found


def features(rows: DatasetDict, tokenizer, ids: dict[str, int], data_args: DataTrainingArguments) -> DatasetDict:
    """The rows as token ids and labels."""

    def convert(batch: dict) -> dict:
        encoded = tokenizer(
            batch[data_args.text_column_name],
            is_split_into_words=True,
            truncation=True,
            max_length=data_args.max_seq_length,
        )
        encoded["labels"] = [
            align([ids[str(tag)] for tag in tags], encoded.word_ids(row), data_args.label_all_tokens)
            for row, tags in enumerate(batch[data_args.label_column_name])
        ]
        return encoded

    return rows.map(convert, batched=True, remove_columns=rows["train"].column_names)


def spans(tags: list[str]) -> set[tuple[int, int, str]]:
    """The names in a sentence as (start, end, kind), read from B- and I- tags."""
    found, start, kind = set(), 0, ""
    for place, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            found.add((start, place, kind))
            kind = ""
        if tag.startswith("B-") or (tag.startswith("I-") and not kind):
            start, kind = place, tag[2:]
    return found


def score(prediction: EvalPrediction, tags: list[str]) -> dict[str, float]:
    """Precision, recall and F1 of whole names, and the share of words with the right tag."""
    right = guessed = there = same = words = 0
    for guess, truth in zip(np.argmax(prediction.predictions, axis=2), prediction.label_ids, strict=True):
        kept = truth != NO_LABEL
        guess, truth = guess[kept], truth[kept]
        guesses, truths = spans([tags[tag] for tag in guess]), spans([tags[tag] for tag in truth])
        right, guessed, there = right + len(guesses & truths), guessed + len(guesses), there + len(truths)
        same, words = same + int((guess == truth).sum()), words + len(truth)
    f1 = 2 * right / max(guessed + there, 1)
    return {"precision": right / max(guessed, 1), "recall": right / max(there, 1), "f1": f1, "accuracy": same / words}


def main() -> None:
    """Train, evaluate and save, as the command line says."""
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    logger.warning("Device: %s", training_args.device)
    set_seed(training_args.seed)

    rows = sources.tagged(data_args.train_file, data_args.validation_file)
    everything = (tag for part in rows.values() for row in part[data_args.label_column_name] for tag in row)
    tags = sorted({str(tag) for tag in everything})
    tokenizer, model = build(model_args, rows["train"][data_args.text_column_name], tags)
    ready = features(rows, tokenizer, model.config.label2id, data_args)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=ready["train"] if training_args.do_train else None,
        eval_dataset=ready["validation"] if training_args.do_eval else None,
        compute_metrics=lambda prediction: score(prediction, tags),
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
    )
    if training_args.do_train:
        metrics = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint).metrics
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
