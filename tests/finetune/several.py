"""Recipes that one, two and four processes train: tiny models without dropout, rows that none of them divides evenly.

Run as a program in a folder that `write` made, it trains them all in worlds of one, two and four processes, each forked
from one that has imported everything: a start of Python for each would take longer than all trainings.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

WORLDS = (1, 2, 4)
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
    "several-labels": {
        "task": "text-classification",
        "model": "bert",
        "data": {"columns": {"text": "text", "label": "labels"}},
    },
    "pairs": {
        "task": "rerank",
        "model": "bert",
        "data": {"columns": {"text": "text", "text_pair": "answer", "label": "label"}},
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
        "labels": [word for word in ("boat", "kite", "drum") if word in words],
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


def world(size: int, port: int) -> int:
    """Train every recipe in a world of `size` processes; the number of those that failed."""
    children = []
    for rank in range(size):
        child = os.fork()
        if not child:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
            os._exit(_train(size))
        children.append(child)
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def _train(processes: int) -> int:
    from hf_mps.cli.main import main

    try:
        codes = [main(["finetune", *words_of(name, processes)]) for name in RECIPES]
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return max(codes)


def main() -> int:
    """Train in every world, smallest first; exit code 1 where a process failed."""
    import sentence_transformers  # noqa: F401
    import transformers  # noqa: F401

    from hf_mps.finetune import tasks
    from hf_mps.finetune.run import prepare  # noqa: F401

    for values in RECIPES.values():
        tasks.module(values["task"])
    for size in WORLDS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        if world(size, port):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
