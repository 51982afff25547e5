"""What a run left, opened again: its folder, a folder that `save_pretrained` wrote, or a name on the hub."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, neighbour
from hf_mps.finetune import tasks
from hf_mps.finetune.models import checkpoint
from hf_mps.finetune.models.checkpoint import Checkpoint
from hf_mps.finetune.recipe import overrides
from hf_mps.finetune.recipe.resolve import validate
from hf_mps.finetune.recipe.schema import Recipe
from hf_mps.finetune.recipe.yaml import Document, read_yaml
from hf_mps.finetune.run.failures import RESULTS
from hf_mps.finetune.run.run_dir import MODEL_FILES, RECIPE, checkpoints
from hf_mps.saved import adapter, kind

# The rows of a model without a run: `predict` brings its own, `evaluate` asks for them.
NOWHERE = "no-rows"
# What a recipe says of its training alone, at the values that leave a saved model as it is.
TRAINED: dict[str, Any] = {"lora": None, "packing": False, "model_type": None, "chat_template": None}
TRAINED |= {"config_overrides": {}}


@dataclass(frozen=True)
class SavedRun:
    """A saved model and all that is known of it.

    `where` is the user's word; `recipe` is the run's own, or the task's defaults for a model without a run, whose
    `results` are None. `checkpoint` opens the saved model, `base` is what it was trained from.
    """

    where: str
    task: Choice[str]
    recipe: Recipe
    document: Document
    checkpoint: Checkpoint
    base: Checkpoint | None
    results: Mapping[str, Any] | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        """The values of the run's choices by their names; empty for a model without a run."""
        choices = (self.results or {}).get("choices", {})
        return {name: choice["value"] for name, choice in choices.items()}

    @property
    def to_use(self) -> Recipe:
        """The recipe without what changes a model before it is trained: the saved one has it."""
        fields = type(self.recipe).model_fields
        said = {key: value for key, value in TRAINED.items() if key in fields}
        return self.recipe.model_copy(update=said)

    @property
    def module(self) -> Any:
        """The task's module."""
        return tasks.module(self.task.value)

    def with_words(self, words: Sequence[str]) -> SavedRun:
        """Return the same with the recipe's keys that `words` (KEY=VALUE) change. Raises UserError."""
        if not words:
            return self
        document = overrides.lay(self.document, overrides.parse(words, self.task.value))
        return replace(self, document=document, recipe=validate(document))

    def in_dtype(self, dtype: str) -> SavedRun:
        """Return the same with weights of another type in memory: float32, bfloat16, float16."""
        return replace(self, checkpoint=_in_dtype(self.checkpoint, dtype))


def open_run(where: str, task: str | None = None) -> SavedRun:
    """Return what is saved at `where`: a run's folder or a checkpoint in it, any folder of from_pretrained, a hub name.

    `task` overrides what the configuration of a model without a run tells. No weights are loaded, and torch is not
    imported. Raises UserError for a folder that holds no model, and for what cannot be read.
    """
    path = Path(where).expanduser()
    if where.startswith(checkpoint.PYPI) or not path.is_dir():
        if path.is_file() or (where.startswith((".", "/", "~")) or where.count("/") > 1):
            problem = "is a file" if path.is_file() else f"there is no such folder{neighbour(path)}"
            raise UserError(f"{where}: {problem}; allowed: a run's folder, one that save_pretrained wrote, a hub name")
        return _without_run(where, checkpoint.resolve(where), None, task)
    home = path.resolve()
    if home.name.startswith("checkpoint-") and _is_run(home.parent):
        home = home.parent
    if _is_run(home):
        return _of_run(where, path, home, task)
    return _without_run(where, *_model_in(where, path), task)


def _is_run(folder: Path) -> bool:
    return (folder / RECIPE).is_file() or (folder / RESULTS).is_file()


def _of_run(where: str, path: Path, home: Path, task: str | None) -> SavedRun:
    """Return the run in `home`, with the model in `path`: its own folder or a checkpoint. Raises UserError."""
    results = _results(where, home / RESULTS)
    if not any((path / name).is_file() for name in MODEL_FILES):
        whole = checkpoints(home)
        way_on = f"{whole[-1]}, its newest checkpoint" if whole else "the command of its recipe.yaml, which goes on"
        raise UserError(f"{where} holds a run that has not ended and no model yet; next: {way_on}")
    stored = (home / RECIPE).is_file()
    document = read_yaml(home / RECIPE) if stored else Document(_given(results or {}))
    recipe = validate(document)
    if task not in (None, recipe.task):
        raise UserError(f"--task {task}: {where} is a run of {recipe.task}; leave --task out")
    source, _ = _model_in(where, path, base=recipe.model, dtype=recipe.weights)
    base = _base(recipe.model, recipe.weights)
    said = Choice(recipe.task, f"its {RECIPE if stored else RESULTS}")
    return SavedRun(where, said, recipe, document, source, base, results)


def _given(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe in a results.json, as plain values."""
    recipe = copy.deepcopy(results.get("recipe"))
    return recipe if isinstance(recipe, dict) else {}


def _base(model: str, dtype: str) -> Checkpoint | None:
    """Return what a run was trained from, where it is still there."""
    try:
        return _in_dtype(checkpoint.resolve(model), dtype)
    except UserError:
        return None


def _results(where: str, path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: its {RESULTS} cannot be read: {error}; next: train the recipe again") from error
    return results if isinstance(results, dict) else None


def _without_run(where: str, source: Checkpoint, base: Checkpoint | None, task: str | None) -> SavedRun:
    """Return a model that comes without a run: the task's defaults, for rows that are given later."""
    said = kind.of(source, task)
    values = {"task": said.value, "model": where, "data": {"files": {"train": NOWHERE, "validation": NOWHERE}}}
    if said.value == "translation":
        values["data"]["columns"] = {"source": "source", "target": "target"}  # type: ignore[index]
    document = Document(values)
    return SavedRun(where, said, validate(document), document, source, base)


def _model_in(
    where: str, folder: Path, base: str | None = None, dtype: str = "float32"
) -> tuple[Checkpoint, Checkpoint | None]:
    """Return the checkpoint in a folder, and the base model of an adapter. Raises UserError where it holds neither."""
    if (folder / adapter.FILE).is_file():
        found = adapter.read(where, folder, base, dtype)
        return found, found.base
    if not any((folder / name).is_file() for name in MODEL_FILES):
        raise UserError(
            f"{where}: the folder holds no model; allowed: a run's folder, or one that save_pretrained wrote"
        )
    return Checkpoint(where, str(folder), True, dtype=dtype), None


def _in_dtype(source: Checkpoint, dtype: str) -> Checkpoint:
    if isinstance(source, adapter.Adapter):
        return replace(source, dtype=dtype, base=replace(source.base, dtype=dtype))
    return replace(source, dtype=dtype)
