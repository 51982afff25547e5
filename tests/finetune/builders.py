"""A recipe of plain values, prepared and put into its trainer on the device mps, without the runner around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sklearn  # noqa: F401  sets KMP_ variables when it is first imported, which no single test is to answer for

from hf_mps.finetune.tasks import Prepared

TEXTS = (
    "Lily saw a big red ball in the park.",
    "The ball was round and it could roll far away!",
    "Tom and his dog ran to the tree to find a bird.",
    "One day, a little cat wanted to play with the moon.",
    "The sun was warm, so they sat on the grass and had a nap.",
    "He said: I like my new toy car, do you want to see it?",
)


def recipe(**values: Any) -> Any:
    """The validated recipe of these values."""
    from hf_mps.finetune.recipe.overrides import Document
    from hf_mps.finetune.recipe.resolve import validate

    return validate(Document(values, overridden=frozenset(values)))  # as if all of it were typed


def prepare(**values: Any) -> Prepared:
    """What the task makes of the recipe of these values, on the device that is there."""
    import hf_mps.metal.device
    from hf_mps.finetune import tasks
    from hf_mps.finetune.data import load
    from hf_mps.finetune.models import checkpoint

    made = recipe(**values)
    task = tasks.find(made.task)(made, checkpoint.resolve(made.model), hf_mps.metal.device.choose().value)
    return task.prepare(load.load(made.data, made.seed))


def trainer(prepared: Prepared, folder: Path, **settings: Any) -> Any:
    """The task's trainer, with its own arguments and these laid over them."""
    from transformers import Trainer, TrainingArguments

    said = {"output_dir": str(folder), "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 1}
    said |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 2, "logging_steps": 1}
    said |= prepared.arguments_defaults | {"dataloader_pin_memory": False} | settings
    return (prepared.trainer or Trainer)(
        model=prepared.model,
        args=(prepared.arguments or TrainingArguments)(**said),
        train_dataset=prepared.train,
        eval_dataset=prepared.validation,
        data_collator=prepared.collator,
        processing_class=prepared.processing_class,
        compute_metrics=prepared.compute_metrics,
        **prepared.trainer_settings,
    )


def model(folder: Path, architecture: str) -> Path:
    """A tiny model of an architecture with random weights, and a tokenizer that has learned its words from TEXTS."""
    from hf_mps.finetune import smoke
    from hf_mps.finetune.smoke.processors import WORDS, Family

    place = folder / architecture
    if not place.is_dir():
        smoke.write(Family(architecture, "text", WORDS[architecture], {}), place, TEXTS * 4, 1)
    return place
