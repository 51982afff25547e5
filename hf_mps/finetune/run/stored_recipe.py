"""The recipe of a run, kept in its folder from the start: what tells whether a later call asks for the same run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_mps.core.errors import UserError
from hf_mps.core.files import plain, write_atomic
from hf_mps.finetune.recipe import paths, training_section
from hf_mps.finetune.recipe import yaml as document
from hf_mps.finetune.recipe.resolve import Order

FILE = "recipe.yaml"
# What may differ without making another run of it: where it lies, what it promises, who is told of it.
FREE = ("output_dir", "expect", "training.report_to", "training.run_name")


def store(output: Path, order: Order) -> Path:
    """Write the recipe of `order`, the command line's words in it, as a recipe that runs by itself; return its path."""
    import yaml

    words = shlex.join(order.words)
    head = f"# The recipe of this run, as it was given: hf-mps finetune {words}\n"
    text = yaml.safe_dump(resolved(order), sort_keys=False, allow_unicode=True, width=120)
    return write_atomic(output / FILE, head + text)


def resolved(order: Order) -> dict[str, Any]:
    """Every key of the recipe that is not at its default, with its paths from the root of the disk."""
    values = plain(order.recipe.model_dump(exclude_none=True, exclude_defaults=True))
    values.pop("output_dir", None)
    assert isinstance(values, dict)
    paths.changed(values, lambda name: Path(name).expanduser().resolve())
    return values


def differences(output: Path, order: Order) -> list[str] | None:
    """What `order` says otherwise than the run in `output`, as `seed 1 → 2`; None where no recipe can be read there."""
    try:
        values = document.read(output / FILE).values
        if isinstance(training := values.get("training"), dict):
            values["training"] = training_section.installed(training)  # of a run with another transformers
        before = dict(_flat(values))
    except UserError:
        return None
    now = dict(_flat(resolved(order)))
    return [
        f"{key} {_shown(before.get(key))} → {_shown(now.get(key))}"
        for key in dict.fromkeys([*before, *now])
        if before.get(key) != now.get(key) and not key.startswith(FREE)
    ]


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each plain value under its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return "not given" if value is None else str(value)
