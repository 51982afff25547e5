"""What the user's words name: a recipe with overrides, or a model with a task, whose recipe then is the frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune import tasks
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.recipe import catalogue
from hf_mps.finetune.recipe.overrides import read_yaml
from hf_mps.finetune.recipe.resolve import ResolvedRecipe, load_recipe


@dataclass(frozen=True)
class Target:
    """A recipe to look at. `name` is what the user called it; `facts` say what stands in for what."""

    name: str
    resolved: ResolvedRecipe
    facts: dict[str, Choice[Any]] = field(default_factory=dict)

    def varied(self, values: Mapping[str, Any]) -> Target:
        """Return the same target with other values of dotted keys. Raises UserError for what the recipe refuses."""
        return replace(self, resolved=self.resolved.with_overrides(values))


def is_command(words: Sequence[str]) -> bool:
    """Return whether some words begin as a script's command line does: python, a .py file, -m, a launcher."""
    first = words[0].rpartition("/")[2] if words else ""
    return first.startswith(("python", "-m", "torchrun", "accelerate")) or first.endswith(".py")


def resolve_target(name: str, overrides: Sequence[str] = (), task: str | None = None) -> Target:
    """Return the target called `name`: a recipe, its YAML file, or with `task` a hub id, a folder, or pypi:PACKAGE.

    Imports no torch. Raises UserError for a name or task that there is not, and for what the recipe refuses.
    """
    if wrong := [word for word in overrides if "=" not in word]:
        raise UserError(f"'{wrong[0]}' is not KEY=VALUE; next, for a script: hf-mps audit -- python SCRIPT")
    if task is None:
        try:
            return Target(name, load_recipe(name, overrides))
        except UserError as error:
            folder = Path(name).is_dir()
            if "is not a recipe" not in str(error) or not (folder or "/" in name):
                raise
            told = f"{name} is a folder, not a recipe" if folder else error
            raise UserError(f"{told}; for a model, say what it is to learn: --task TASK") from error
    if task not in tasks.names():
        allowed = ", ".join(tasks.names())
        raise UserError(f"--task {task} is not a task; allowed: {allowed}{nearest(task, tasks.names())}")
    frame = next((each for each in catalogue.entries() if read_yaml(each.path).values.get("task") == task), None)
    if frame is None:
        raise UserError(f"--task {task}: no recipe that comes with hf_mps has it; next: a YAML file of your own")
    checkpoint.resolve(name)
    resolved = load_recipe(frame.name, overrides)
    if "model" in resolved.overrides:
        raise UserError("command line: model is given twice; give it once")
    reason = f"rows, lengths and settings as in this recipe, the task's own; the model is {name}"
    return Target(name, resolved.with_overrides({"model": name}), {"recipe": Choice(frame.name, reason)})
