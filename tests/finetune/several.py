"""Recipes that one, two and four processes train: tiny models without dropout, rows that none of them divides evenly.

Run as a program by torchrun in a folder that `write` made, it trains them one after the other: `several.py TASK…`.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

TRAIN, VALIDATION, GLOBAL_BATCH, EVALUATED = 40, 17, 8, 4
WORDS = (
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
)
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
    "embeddings": {
        "task": "sentence-embeddings",
        "model": "bert",
        "data": {"columns": {"text": "text", "text_pair": "answer"}},
        "training": {"batch_sampler": "batch_sampler"},
    },
}


def write(folder: Path) -> None:
    """Write models, rows and recipes into `folder`."""
    from hf_mps.finetune.smoke import tiny_model
    from hf_mps.finetune.smoke.families import Family

    draw = random.Random(0)
    rows = [_row(draw) for _ in range(TRAIN + VALIDATION)]
    for split, some in (("train", rows[:TRAIN]), ("validation", rows[TRAIN:])):
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in some), encoding="utf-8")
    for name, words in (("bert", "wordpiece"), ("qwen2", "chat")):
        tiny_model.write(Family(name, "text", words, {}), folder / name, [" ".join(WORDS)] * 8, 0)  # type: ignore[arg-type]
        path = folder / name / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config |= {key: 0.0 for key in config if "dropout" in key}
        path.write_text(json.dumps(config), encoding="utf-8")
    for name, values in RECIPES.items():
        made = {**values, "data": {**values["data"], "files": {s: f"{s}.jsonl" for s in ("train", "validation")}}}
        (folder / f"{name}.yaml").write_text(json.dumps(made), encoding="utf-8")


def _row(draw: random.Random) -> dict[str, Any]:
    words = [draw.choice(WORDS) for _ in range(draw.randint(3, 14))]
    answer = [draw.choice(WORDS) for _ in range(draw.randint(1, 9))]
    return {
        "text": " ".join(words),
        "answer": " ".join(answer),
        "label": int("boat" in words),
        "tokens": words,
        "tags": ["THING" if word in ("boat", "kite", "drum") else "O" for word in words],
    }


def words_of(name: str, processes: int) -> list[str]:
    """The command line's words for a recipe in so many processes, the rows of a step always the same."""
    settings = {
        "per_device_train_batch_size": GLOBAL_BATCH // processes,
        "per_device_eval_batch_size": EVALUATED,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "bf16": "false",
        "save_strategy": "'no'",
    }
    return [f"{name}.yaml", f"output_dir={name}-{processes}", *(f"training.{key}={v}" for key, v in settings.items())]


def main(processes: int, names: list[str]) -> int:
    """Train each of the recipes; the exit code of the first that fails."""
    from hf_mps.cli.main import main as command

    codes = (command(["finetune", *words_of(name, processes)]) for name in names)
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
