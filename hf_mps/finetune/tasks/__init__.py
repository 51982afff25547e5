"""The tasks, a file each: `text_classification.py` is the task `text-classification`.

A task's module offers
- `Recipe`, its subclass of `hf_mps.finetune.recipe.schema.Recipe`: its own keys, and the columns of its data by
  their roles;
- `prepare(recipe, rows, checkpoint, device)`, which returns `hf_mps.finetune.tasks._base.Prepared`;
- `smoke_rows(recipe, folder)`, a few generated rows of each split ({"train": […], "validation": […]}) under the names
  of the recipe's own columns, as JSON holds them; files that rows name (images, sound) are written into `folder`;
- `answer(recipe, checkpoint, chosen, device)`, which returns `hf_mps.finetune.tasks._answering.Answering`: how a saved
  model answers rows without their labels. `checkpoint` opens the saved model (with its adapter, where it is one) as
  `prepare`'s opens a fresh one; `recipe` is that of its run, or the task's defaults where a model comes without one;
  `chosen` holds what the run chose, by the names of `Prepared.choices` and as results.json has the values, and is empty
  where a model comes without a run. Rows are made into features by the functions that `prepare` uses;
- `TRUTH`, the roles that only rows with labels have, and `OPTIONAL`, those that a row to be answered may lack beside
  them (`input` of Alpaca's); `ASKED`, columns by their roles that such rows may have though the recipe names none. Each
  is left out where there are none;
- `CHATS = True`, only where its models answer conversations (`hf-mps chat`);
- `reference(recipe)`, only where a saved model is measured against the one that it was trained from, which it returns;
- `ARGUMENTS`, only where it trains with a subclass of TrainingArguments: its file's path inside site-packages and the
  class ("transformers/training_args_seq2seq.py", "Seq2SeqTrainingArguments");
- `SETTLED`, only where it sets fields of those arguments itself: {field: where the recipe says it, or why not at all};
- `SMOKE`, only where a smoke run needs further fields of the arguments to be small: {field: value}.

What several tasks need stands beside this package (`labels`, `lengths`, `tokens`), not in one of them.

Importing a task must not import torch: a recipe is validated without it.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any


def names() -> list[str]:
    """The tasks there are, as a recipe names them."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")


def module(task: str) -> Any:
    """The module of `task`, one of `names()`."""
    return import_module(f"{__name__}.{task.replace('-', '_')}")
