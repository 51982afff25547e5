"""Small recipes whose runs are compared to the last bit or digit: tiny models, rows written on the spot."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.finetune import senses, tiny

WORDS = [
    "the",
    "a",
    "red",
    "old",
    "boat",
    "kite",
    "drum",
    "sails",
    "sounds",
    "flies",
    "far",
    "home",
    "now",
    "and",
    "we",
]
THINGS = ("boat", "kite", "drum")
TEXTS = {"train": 40, "validation": 17}
"""Rows of text, which two and four processes cannot share evenly."""
SEEN = {"train": 16, "validation": 9}
"""Rows with an image each."""
LOW = "tests.finetune.rewards.functions.low"

RECIPES: dict[str, dict[str, Any]] = {
    "classification": {
        "task": "text-classification",
        "model": "bert",
        "data": {"columns": {"text": "text", "label": "label"}},
    },
    "tokens": {
        "task": "token-classification",
        "model": "bert",
        "data": {"columns": {"words": "tokens", "tags": "tags"}},
    },
    "packed": {
        "task": "sft",
        "model": "qwen2",
        "max_length": 64,
        "packing": True,
        "lora": {"r": 4},
        "generate": {"rows": 3, "max_new_tokens": 4},
        "data": {"columns": {"instruction": "text", "output": "answer"}},
    },
    "quantized": {
        "task": "sft",
        "model": "qwen2",
        "max_length": 64,
        "packing": False,
        "lora": {"r": 4},
        "quantization": "nf4",
        "generate": {"rows": 3, "max_new_tokens": 4},
        "data": {"columns": {"instruction": "text", "output": "answer"}},
    },
    "several-labels": {
        "task": "text-classification",
        "model": "bert",
        "data": {"columns": {"text": "text", "label": "labels"}},
    },
    "masked": {"task": "masked-lm", "model": "bert", "max_length": 16, "data": {"columns": {"text": "text"}}},
    "pairs": {
        "task": "rerank",
        "model": "bert",
        "data": {"columns": {"text": "text", "text_pair": "answer", "label": "label"}},
    },
    "lists": {
        "task": "rerank",
        "model": "bert",
        "data": {"columns": {"text": "text", "documents": "answers", "label": "right"}},
    },
    "embeddings": {
        "task": "sentence-embeddings",
        "model": "bert",
        "data": {"columns": {"text": "text", "text_pair": "answer"}},
        "training": {"batch_sampler": "batch_sampler"},
    },
    "sparse": {
        "task": "sparse-embeddings",
        "model": "distilbert",
        "data": {"columns": {"text": "text", "text_pair": "answer"}},
        "training": {"batch_sampler": "batch_sampler"},
    },
    "taught": {
        "task": "distill",
        "model": "qwen2",
        "teacher": "qwen2-teacher",
        "max_length": 64,
        "generate": {"rows": 2, "max_new_tokens": 4},
        "distillation": {"max_new_tokens": 4, "lmbda": 0.7},
        "data": {"columns": {"instruction": "text", "output": "answer"}},
    },
    "preferences": {
        "task": "dpo",
        "model": "qwen2",
        "max_length": 64,
        "data": {"columns": {"prompt": "text", "chosen": "answer", "rejected": "worse"}},
    },
    "odds": {
        "task": "orpo",
        "model": "qwen2",
        "max_length": 64,
        "data": {"columns": {"prompt": "text", "chosen": "answer", "rejected": "worse"}},
    },
    "wanted": {
        "task": "kto",
        "model": "qwen2",
        "max_length": 64,
        "data": {"columns": {"prompt": "text", "completion": "answer", "label": "label"}},
    },
    "rewards": {
        "task": "grpo",
        "model": "qwen2",
        "max_length": 64,
        "rewards": LOW,
        "data": {"columns": {"prompt": "text"}},
        "training": {"num_generations": 4, "max_completion_length": 6, "gradient_accumulation_steps": 1},
    },
    "speech": {
        "task": "speech-seq2seq",
        "model": "ear",
        "language": "hindi",
        "normalizer": "basic",
        "max_target_length": 16,
    },
    "masks": {
        "task": "image-segmentation",
        "model": "segformer",
        "data": {"columns": {"image": "image", "mask": "mask"}, "labels": ["ground", "red", "blue"]},
    },
    "boxes": {
        "task": "object-detection",
        "model": "yolos",
        "image_size": 32,
        "data": {"columns": {"image": "image", "objects": "objects"}, "labels": ["red", "blue"]},
    },
    "pictures": {
        "task": "image-generation",
        "model": "painter",
        "image_size": 64,
        "lora": {"lora_dropout": 0.1},
        "generate": {"rows": 1, "num_inference_steps": 2},
        "data": {"columns": {"image": "image", "text": "text"}},
    },
    "questions": {
        "task": "image-text",
        "model": "smol",
        "max_image_tokens": 12,
        "lora": {"r": 4},
        "generate": {"rows": 3, "max_new_tokens": 4},
        "data": {"columns": {"image": "image", "question": "question", "answer": "answer"}},
    },
}


def write(folder: Path, names: Iterable[str], dropout: float) -> None:
    """Write these recipes into `folder`, their rows, and their models with a dropout of so much."""
    for name in names:
        values = RECIPES[name]
        model = values["model"]
        rows, place = ROWS.get(model, _texts), folder / model
        if not place.is_dir():
            MODELS.get(model, _reader)(place)
            _set_dropout(place, dropout)
        if (teacher := values.get("teacher")) and not (folder / teacher).is_dir():
            _reader(folder / teacher, seed=1)
        (folder / f"{model}-rows").mkdir(exist_ok=True)
        files = {}
        for split, some in rows(folder / f"{model}-rows").items():
            file = tiny.write_jsonl(folder / f"{model}-rows" / f"{split}.jsonl", some)
            files[split] = file.relative_to(folder).as_posix()
        made = {**values, "data": {**values.get("data", {}), "files": files}}
        (folder / f"{name}.yaml").write_text(json.dumps(made), encoding="utf-8")


def _set_dropout(place: Path, share: float) -> None:
    path = place / "config.json"
    if not path.is_file():  # a pipeline's parts have theirs in folders, and its adapters' dropout is the recipe's
        return

    def said(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: share if "dropout" in key or "drop_path" in key else said(one) for key, one in value.items()}

    path.write_text(json.dumps(said(json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")


def _reader(place: Path, seed: int = 0) -> None:
    """A tiny model of text of the architecture that its folder is named for, up to a dash."""
    from hf_mps.finetune import smoke
    from hf_mps.finetune.smoke.processors import WORDS as KINDS
    from hf_mps.finetune.smoke.processors import Family

    name = place.name.partition("-")[0]
    smoke.write(Family(name, "text", KINDS[name], {}), place, [" ".join(WORDS)] * 8, seed)


def _texts(folder: Path) -> dict[str, list[dict[str, Any]]]:
    draw = random.Random(0)
    return {split: [_text(draw) for _ in range(count)] for split, count in TEXTS.items()}


def _text(draw: random.Random) -> dict[str, Any]:
    words = [draw.choice(WORDS) for _ in range(draw.randint(3, 14))]
    answer = [draw.choice(WORDS) for _ in range(draw.randint(1, 9))]
    answers = [" ".join(answer), *(draw.choice(WORDS) for _ in range(draw.randint(1, 2)))]
    return {
        "text": " ".join(words),
        "answer": answers[0],
        "worse": " ".join(reversed(words)),
        "answers": answers,
        "right": [int(place == 0) for place in range(len(answers))],
        "label": int("boat" in words),
        "labels": [word for word in THINGS if word in words],
        "tokens": words,
        "tags": ["THING" if word in THINGS else "O" for word in words],
    }


def _spoken(folder: Path) -> dict[str, list[dict[str, Any]]]:
    made = senses.spoken(folder)
    lines = {split: [row | {"audio": Path(row["audio"]).name} for row in rows] for split, rows in made.items()}
    return lines | {"validation": lines["validation"][1:]}


def _seen(folder: Path, one: Callable[[Path, int], dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    numbers = {"train": range(SEEN["train"]), "validation": range(SEEN["train"], sum(SEEN.values()))}
    return {split: [one(folder, number) for number in some] for split, some in numbers.items()}


MODELS: dict[str, Callable[[Path], Any]] = {
    "ear": senses.ear,
    "segformer": senses.segformer,
    "yolos": senses.yolos,
    "smol": senses.smol,
    "painter": senses.painter,
}
ROWS: dict[str, Callable[[Path], dict[str, list[dict[str, Any]]]]] = {
    "ear": _spoken,
    "segformer": lambda folder: _seen(folder, senses.masked),
    "yolos": lambda folder: _seen(folder, senses.boxed),
    "painter": lambda folder: _seen(folder, senses.captioned),
    "smol": lambda folder: _seen(folder, lambda folder, number: senses.questions(folder, 1, number)[0]),
}
