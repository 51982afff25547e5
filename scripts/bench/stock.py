"""Trainings as the documentation has them: transformers' own Trainer, batches padded to their longest row.

The other side of compare_stock.py. Rows and settings are those of a recipe; nothing else of hf_mps takes part, and the
layer has to be off (HF_MPS=0). The steps follow transformers' guides for text classification and question answering
(https://huggingface.co/docs/transformers/tasks/sequence_classification, …/question_answering) and the course's
post-processing of answers (https://huggingface.co/learn/llm-course/chapter7/7).
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
    set_seed,
)

from hf_mps import metrics
from hf_mps.finetune.data import load
from hf_mps.finetune.data.rows import Rows
from hf_mps.finetune.models.checkpoint import resolve
from hf_mps.finetune.recipe.schema import Recipe

N_BEST, LONGEST_ANSWER = 20, 30


def train(recipe: Recipe, output: Path, *, cuda: bool = False) -> dict[str, float]:
    """Train as `recipe` says, on the CPU or with `cuda` on the GPU, and return its metrics on the validation rows.

    `train_seconds` stands among them.
    """
    sides = {"text-classification": classification, "question-answering": question_answering}
    rows = load.load(recipe.data, recipe.seed)
    set_seed(recipe.seed)
    return sides[recipe.task](recipe, rows, resolve(recipe.model).source, arguments(recipe, output, cuda))


def arguments(recipe: Recipe, output: Path, cuda: bool) -> TrainingArguments:
    """The recipe's own training arguments."""
    unsaved = {"save_strategy": "no", "eval_strategy": "no", "logging_steps": 50}
    ours = {
        "output_dir": str(output),
        "seed": recipe.seed,
        "use_cpu": not cuda,
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**recipe.training | unsaved | ours)


def classification(recipe: Any, rows: dict[str, Rows], model: str, training: TrainingArguments) -> dict[str, float]:
    """One or two texts to a class, or to a number where every label has a decimal point."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    regression = recipe.problem_type == "regression"
    names = sorted({str(label) for label in rows["train"].dataset["label"]})

    def features(batch: dict[str, list[Any]]) -> dict[str, Any]:
        texts = [batch[role] for role in ("text", "text_pair") if role in batch]
        encoded = tokenizer(*texts, truncation=True, max_length=recipe.max_length)
        labels = [float(label) if regression else names.index(str(label)) for label in batch["label"]]
        return {**encoded, "labels": labels}

    ready = {
        split: part.dataset.map(features, batched=True, remove_columns=part.dataset.column_names)
        for split, part in rows.items()
    }
    settings = {"num_labels": 1} if regression else {"num_labels": len(names)}
    network = AutoModelForSequenceClassification.from_pretrained(model, **settings)
    trainer = Trainer(
        network,
        training,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=ready["train"],
        processing_class=tokenizer,
    )
    seconds = trainer.train().metrics["train_runtime"]
    found = trainer.predict(ready["validation"])
    answers = found.predictions.squeeze(-1) if regression else found.predictions.argmax(-1)
    return metrics.load(recipe.metrics).compute(answers, found.label_ids) | {"train_seconds": seconds}


def question_answering(recipe: Any, rows: dict[str, Rows], model: str, training: TrainingArguments) -> dict[str, float]:
    """A span of the text, from windows of tokens and the best pairs of a start and an end."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    parts = {split: windows(part.dataset, tokenizer, recipe) for split, part in rows.items()}
    taken = [name for name in parts["train"].column_names if name not in ("row", "offset_mapping")]
    trainer = Trainer(
        AutoModelForQuestionAnswering.from_pretrained(model),
        training,
        data_collator=DataCollatorWithPadding(tokenizer),
        train_dataset=parts["train"].select_columns(taken),
        processing_class=tokenizer,
    )
    seconds = trainer.train().metrics["train_runtime"]
    starts, ends = trainer.predict(parts["validation"].select_columns(taken)).predictions[:2]
    dev = rows["validation"].dataset
    answers = spans(dev, parts["validation"], starts, ends)
    predictions = [{"id": str(number), "prediction_text": text} for number, text in enumerate(answers)]
    truths = [
        {"id": str(number), "answers": {"text": (said := texts(row)), "answer_start": [0] * len(said)}}
        for number, row in enumerate(dev["answers"])
    ]
    return metrics.load(recipe.metrics).compute(predictions, truths) | {"train_seconds": seconds}


def texts(answers: Any) -> list[str]:
    """The texts of a row's answers: a dict of lists on the hub, a list of dicts in SQuAD's own files."""
    return answers["text"] if isinstance(answers, dict) else [one["text"] for one in answers]


def first(answers: Any) -> tuple[int, str]:
    """Where a row's first answer begins, in characters, and its text."""
    if isinstance(answers, dict):
        return answers["answer_start"][0], answers["text"][0]
    return answers[0]["answer_start"], answers[0]["text"]


def windows(rows: Dataset, tokenizer: Any, recipe: Any) -> Dataset:
    """Questions with their texts in overlapping windows, the answer's tokens in each (0 where it is not inside)."""

    def features(batch: dict[str, list[Any]], numbers: list[int]) -> dict[str, Any]:
        encoded = tokenizer(
            [question.strip() for question in batch["question"]],
            batch["context"],
            truncation="only_second",
            max_length=recipe.max_length,
            stride=recipe.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        origin = encoded.pop("overflow_to_sample_mapping")
        encoded |= {"start_positions": [], "end_positions": [], "row": [numbers[place] for place in origin]}
        for window, place in enumerate(origin):
            parts, offsets = encoded.sequence_ids(window), encoded["offset_mapping"][window]
            begin, text = first(batch["answers"][place])
            inside = [number for number, part in enumerate(parts) if part == 1]
            start = [number for number in inside if offsets[number][0] <= begin < offsets[number][1]]
            end = [number for number in inside if offsets[number][0] < begin + len(text) <= offsets[number][1]]
            encoded["start_positions"].append(start[0] if start and end else 0)
            encoded["end_positions"].append(end[0] if start and end else 0)
            encoded["offset_mapping"][window] = [
                offset if part == 1 else (-1, -1) for offset, part in zip(offsets, parts, strict=True)
            ]
        return dict(encoded)

    return rows.map(features, batched=True, with_indices=True, remove_columns=rows.column_names)


def spans(rows: Dataset, found: Dataset, starts: np.ndarray, ends: np.ndarray) -> list[str]:
    """The answer to each question: of the best starts and ends of its windows the pair with the greatest sum."""
    of_row = defaultdict(list)
    for window, row in enumerate(found["row"]):
        of_row[row].append(window)
    offsets = found["offset_mapping"]
    answers = []
    for number, context in enumerate(rows["context"]):
        best, text = -np.inf, ""
        for window in of_row[number]:
            width = len(offsets[window])
            firsts, lasts = (np.argsort(side[window][:width])[::-1][:N_BEST] for side in (starts, ends))
            for start in firsts:
                for end in lasts:
                    if not start <= end < start + LONGEST_ANSWER:
                        continue
                    if offsets[window][start][0] < 0 or offsets[window][end][0] < 0:
                        continue
                    score = starts[window][start] + ends[window][end]
                    if score > best:
                        best, text = score, context[offsets[window][start][0] : offsets[window][end][1]]
        answers.append(text)
    return answers
