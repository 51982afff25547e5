"""A smoke run: `hf-mps finetune RECIPE --smoke` runs a recipe end to end in less than a minute, without network.

Task, columns, options and the run's files are the recipe's own. The model is a tiny one of the same architecture with
random weights, the tokenizer is trained on the spot, and the task makes up the rows.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hf_mps.core.choice import Choice
from hf_mps.finetune import tasks
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.known_configs import model_type
from hf_mps.finetune.recipe.overrides import OF_A_SOURCE
from hf_mps.finetune.recipe.resolve import ResolvedRecipe
from hf_mps.finetune.recipe.schema import SOURCES, Recipe
from hf_mps.finetune.run.logging import errors_only, no_bars
from hf_mps.finetune.smoke import processors

SHOWS = "--smoke shows that everything runs, on made-up rows: no score counts"
STEPS = 6
BATCH = 4
# Made-up rows are short: a block of more than LONGEST tokens would be mostly padding, or need very many rows.
LONGEST, SHORT, SHORT_TARGET = 512, 128, 32
TEACHER = "teacher"
"""The key of a second model, which is tiny too, and of the folder that has it."""
SIDE = 128
"""Pixels of an image's sides where a recipe says them (`image_size`)."""
# The settings of a few steps; the command line overrides them.
TRAINING = {
    "max_steps": STEPS,
    "per_device_train_batch_size": BATCH,
    "per_device_eval_batch_size": BATCH,
    "logging_steps": 1,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "report_to": "none",
}
# The plan's choices that TRAINING makes, with the field that determines each.
SETTLED = {
    "batch": "per_device_train_batch_size",
    "steps": "max_steps",
    "evaluation": "eval_strategy",
    "checkpoints": "save_strategy",
}
# Keys of a long run that would exclude or outlast max_steps.
DROPPED = ("num_train_epochs", "eval_steps", "eval_delay", "save_steps", "warmup_steps", "resume_from_checkpoint")


KEPT = ".smoke"
"""The folder of a kept run's tiny model and rows in its own: hidden, so that nothing sends it to the hub."""


@contextmanager
def smoke_recipe(whole: ResolvedRecipe, *, weights: bool = True) -> Iterator[ResolvedRecipe]:
    """The recipe of a smoke run of `whole`, with its model and rows in a folder that lasts as long as the context.

    Without `weights` that folder holds the tiny model's tokenizer or processor alone, for a model from elsewhere.
    Raises UserError where no tiny model of the architecture can be made.
    """
    import datasets

    from hf_mps.finetune.smoke import tiny_model

    task = tasks.find(whole.recipe.task)
    family = family_of(whole.recipe)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hf-mps-smoke-")))
        # A smoke run leaves nothing in the user's cache.
        held.enter_context(patch.object(datasets.config, "HF_DATASETS_CACHE", folder / "cache"))
        rows = task.smoke_rows(whole.recipe, folder)
        said = list(texts(rows["train"]))
        with no_bars(), errors_only():
            if weights:
                if not task.smoke_model(whole.recipe, folder / "model"):
                    tiny_model.write(family, folder / "model", said, whole.recipe.seed)
                if hasattr(whole.recipe, TEACHER):
                    tiny_model.write(family, folder / TEACHER, said, whole.recipe.seed + 1)
            else:
                tiny_model.processor(family, folder / "model", said)
        files = {}
        for split, lines in rows.items():
            files[split] = str(folder / f"{split}.jsonl")
            written = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in lines)
            Path(files[split]).write_text(written, encoding="utf-8")
        recipe = type(whole.recipe).model_validate(_values(whole, files, folder))
        smoke = Choice(f"a tiny {family.name}", "; ".join(filter(None, (family.reason, SHOWS))))
        yield dataclasses.replace(whole, recipe=recipe, smoke=smoke)


def family_of(recipe: Recipe) -> processors.Family:
    """Return the family of the recipe's model, or the usual one of its task where nothing here tells the architecture.

    Raises UserError for a folder or a package without a checkpoint.
    """
    task = tasks.find(recipe.task)
    usual, reads = task.family
    config = checkpoint.resolve(recipe.model).stored_config()
    known = model_type(recipe.model, recipe.model_type, config)
    name, reason = known or usual, ""
    if not known:
        unknown = f"nothing here tells the architecture of {recipe.model} (model_type=NAME does)"
        reason = f"{unknown}: {usual} is usual for {recipe.task}"
    words = processors.WORDS.get(name, task.words) if reads == "text" else ""
    return processors.Family(name, reads, words, config if config.get("model_type") == name else {}, reason)


def explain(small: ResolvedRecipe, choices: dict[str, Choice[Any]]) -> None:
    """Give --smoke as the reason of each choice that the smoke run made, and neither recipe nor command line."""
    for name, key in SETTLED.items():
        if name in choices and f"training.{key}" not in small.changed:
            choices[name] = Choice(choices[name].value, "--smoke, which takes a few short steps")
    if not files_stay(small):
        choices["output"] = Choice(choices["output"].value, "--smoke: gone after the run")


def files_stay(small: ResolvedRecipe) -> bool:
    """Whether the run's files stay: those in an `output_dir` that the recipe or the command line names."""
    return Path(small.recipe.output_dir or "") != Path(small.recipe.model).with_name("run")


def keep(small: ResolvedRecipe) -> None:
    """Copy the model and the rows of a smoke run into the folder where its files stay: the verbs read them there."""
    made, run = Path(small.recipe.model).parent, Path(str(small.recipe.output_dir)).expanduser()
    shutil.copytree(made, run / KEPT, ignore=shutil.ignore_patterns("cache"), dirs_exist_ok=True)
    for file in run.rglob("adapter_config.json"):  # peft finds the base model by it
        whole = file.read_text(encoding="utf-8").replace(str(made), str((run / KEPT).resolve()))
        file.write_text(whole, encoding="utf-8")


def texts(value: Any) -> Iterator[str]:
    """Yield every text inside rows, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from texts(list(value.values()))
    elif isinstance(value, Sequence):
        for item in value:
            yield from texts(item)


def _values(whole: ResolvedRecipe, files: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the recipe's keys with the smoke run's model, files and training in place of its own."""
    values = whole.recipe.model_dump(exclude_none=True, exclude_defaults=True)
    values |= {key: getattr(whole.recipe, key) for key in whole.recipe.TYPED_ALONE}  # which no dump has
    data = {key: value for key, value in values["data"].items() if key not in SOURCES}
    for key in (*(key for keys in SOURCES.values() for key in keys), *(set(OF_A_SOURCE) - {"labels"})):
        data.pop(key, None)
    said = values.get("training", {})
    training = {key: value for key, value in said.items() if key not in DROPPED} | TRAINING
    training |= tasks.find(whole.recipe.task).smoke_arguments
    training["gradient_accumulation_steps"] = min(2, said.get("gradient_accumulation_steps", 1))
    for key in whole.changed:
        section, _, name = key.partition(".")
        if section == "training" and name in said:
            training[name] = said[name]
    if values.get("max_length", 0) > LONGEST and "max_length" not in whole.changed:
        values["max_length"] = SHORT
    if hasattr(whole.recipe, "max_target_length") and "max_target_length" not in values:
        values["max_target_length"] = SHORT_TARGET  # a model that has learned nothing generates as many
    if hasattr(whole.recipe, "image_size") and "image_size" not in whole.changed:
        values["image_size"] = SIDE
    if hasattr(getattr(whole.recipe, "generate", None), "num_inference_steps"):
        values["generate"] = {"num_inference_steps": BATCH, **values.get("generate", {})}
    if TEACHER in values:
        values[TEACHER] = str(folder / TEACHER)
    values.pop("expect", None)
    values.setdefault("output_dir", str(folder / "run"))
    return values | {"model": str(folder / "model"), "data": data | {"files": files}, "training": training}
