"""The record of a run without this machine's paths: its files are published as they are, and name files by their names.

recipe.yaml, which stays here, has the whole paths; with it a run is gone on with.
"""

from __future__ import annotations

import copy
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hf_mps.finetune.recipe.schema import map_paths
from hf_mps.finetune.report.results import RunRecord, is_hub_id

KEPT = ("model", "log_history", "device", "metal_kernels")
"""Fields without paths, and the model, of which the files say its last part alone."""


def without_paths(record: RunRecord, folder: Path) -> RunRecord:
    """Return the record with base names in place of the recipe's paths and of the run's `folder`, wherever they stand.

    The user's home elsewhere becomes `~`.
    """
    names = {path: Path(path).name for said in _of_recipe(record.recipe, folder) for path in _ways(said)}
    paths = sorted(names, key=len, reverse=True)
    found = re.compile("|".join(rf"(?<![\w./~-]){re.escape(path)}(?![\w-])" for path in paths) or r"(?!)")
    home = re.compile(rf"(?<![\w.-]){re.escape(str(Path.home()))}(?=/|$)")

    def change(text: str) -> str:
        return home.sub("~", found.sub(lambda match: names[match[0]], text))

    kept = {one.name: getattr(record, one.name) for one in fields(record) if one.name not in KEPT}
    return replace(record, **{name: _mapped(value, change) for name, value in kept.items()})


def _of_recipe(recipe: dict[str, Any], folder: Path) -> list[str]:
    """The recipe's paths, as the user said them, and the run's folder."""
    values, found = copy.deepcopy(recipe), [str(folder)]
    model = values.pop("model", None)

    def note(said: str) -> Path:
        found.append(said)
        return Path(said)

    map_paths(values, note)
    if isinstance(model, str) and not is_hub_id(model):
        found.append(model)
    if isinstance(output := values.get("output_dir"), str):
        found.append(output)
    return found


def _ways(said: str) -> set[str]:
    """The ways to write a path that has more than a name."""
    whole = Path(said).expanduser()
    ways = {said, str(whole), str(whole.absolute()), str(whole.resolve())}
    return {way for way in ways if "/" in way.rstrip("/") and Path(way).name}


def _mapped(value: Any, change: Any) -> Any:
    """The value with every text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(item, change) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _mapped(getattr(value, one.name), change) for one in fields(value)})
    return change(str(value)) if isinstance(value, Path) else value
