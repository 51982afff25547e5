"""The tasks, a file each: `text_classification.py` is the task `text-classification`.

A task's module offers
- `Recipe`, its subclass of `hf_mps.finetune.recipe.Recipe`: its own keys, and the columns of its data;
- `columns(recipe)`, the role of each column that it reads ({"text": "sentence1", …});
- `prepare(recipe, rows, checkpoint, device)`, which returns `hf_mps.finetune.task.Prepared`.

Importing a task must not import torch: a recipe is validated without it.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any


def names() -> list[str]:
    """The tasks there are, as a recipe names them."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__))


def module(task: str) -> Any:
    """The module of `task`, one of `names()`."""
    return import_module(f"{__name__}.{task.replace('-', '_')}")
