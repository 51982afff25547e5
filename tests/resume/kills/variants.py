"""The recipes that the kills fall into: tiny models with dropout, runs of a second."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.finetune import builders, every_task, tiny

COMMON = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 8, "learning_rate": 0.01, "logging_steps": 2}
STEPS = {"save_strategy": "steps", "eval_strategy": "steps", "max_steps": 13}


@dataclass(frozen=True)
class Variant:
    """A recipe with its settings: a name, the recipe's in every_task.py, fields of `training`, other words, processes.

    `devices` are those that it trains on.
    """

    name: str
    recipe: str
    training: dict[str, Any]
    words: tuple[str, ...] = ()
    ranks: int = 1
    devices: tuple[str, ...] = ("cpu", "simulated")

    def arguments(self, folder: str) -> list[str]:
        """The words behind `hf-mps finetune`, for a run in `folder`."""
        epochs = {} if "max_steps" in self.training else {"num_train_epochs": 2}
        words = (f"training.{key}={value}" for key, value in {**COMMON, **epochs, **self.training}.items())
        return [f"{self.recipe}.yaml", f"output_dir={folder}", *words, *self.words]


STREAM = {**STEPS, "save_steps": 4, "eval_steps": 6, "max_steps": 11}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("epochs", "classification", {"save_strategy": "epoch", "eval_strategy": "epoch"}),
        Variant("max-steps", "classification", {**STEPS, "save_steps": 4, "eval_steps": 3}),
        Variant(
            "accumulation",
            "classification",
            {"gradient_accumulation_steps": 3, "save_strategy": "steps", "save_steps": 2, "num_train_epochs": 3},
        ),
        Variant(
            "best",
            "classification",
            {**STEPS, "save_steps": 3, "eval_steps": 3, "load_best_model_at_end": "true", "save_total_limit": 2},
        ),
        Variant("limit", "tokens", {**STEPS, "save_steps": 2, "eval_steps": 5, "save_total_limit": 1}),
        Variant("lora", "packed", {**STEPS, "save_steps": 2, "eval_steps": 4, "max_steps": 9}),
        Variant("stream", "stream", STREAM),
        Variant("stream-workers", "stream", {**STREAM, "dataloader_num_workers": 2}),
        Variant(
            "early-stopping",
            "classification",
            {**STEPS, "save_steps": 2, "eval_steps": 2, "max_steps": 18, "load_best_model_at_end": "true"},
            ("early_stopping_patience=3",),
        ),
        Variant("masked-lm", "masked", {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "epoch"}),
        Variant("embeddings", "embeddings", {**STEPS, "save_steps": 3, "eval_steps": 4, "max_steps": 11}),
        Variant(
            "grpo",
            "rewards",
            {**STEPS, "save_steps": 2, "eval_steps": 3, "max_steps": 5, "gradient_accumulation_steps": 2},
            ("trust_reward_code=true",),
        ),
        Variant(
            "sweep",
            "classification",
            {**STEPS, "save_steps": 3, "eval_steps": 3, "max_steps": 5},
            ("--sweep", "seed=1,2"),
        ),
        Variant(
            "two-processes",
            "classification",
            {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch"},
            ranks=2,
            devices=("cpu",),
        ),
    )
}


def write(folder: Path) -> None:
    """Write every recipe, its rows and its model into `folder`."""
    every_task.write(folder, {one.recipe for one in VARIANTS.values()} - {"stream"}, dropout=0.1)
    draw = random.Random(1)
    words = [word for text in builders.TEXTS for word in text.split()]
    for number in range(2):
        rows = [{"text": " ".join(draw.choice(words) for _ in range(draw.randint(3, 30)))} for _ in range(60)]
        tiny.write_jsonl(folder / f"web-{number}.jsonl", rows)
    builders.model(folder, "gpt2")
    recipe: dict[str, Any] = {"task": "causal-lm", "model": "gpt2", "max_length": 24, "seed": 1}
    recipe["data"] = {"streaming": True, "files": {"train": "web-*.jsonl"}, "hold_out": 0.1, "shuffle_buffer": 20}
    (folder / "stream.yaml").write_text(json.dumps(recipe), encoding="utf-8")
