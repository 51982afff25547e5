"""The overrides of a recipe: a command line's `key=value` words, parsed once and laid over the file's values."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import yaml

from hf_mps.core.errors import UserError
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.recipe.catalogue import DEEPEST, SHOWN, Document, Values, plain, problem
from hf_mps.finetune.recipe.schema import SHORT, SOURCES

# Keys that belong to a data source and are dropped where an override names another. A folder's columns have the task's
# own names too.
OF_A_SOURCE = ("rows", "labels", "hold_out")
HELD_OUT = 0.1
# Keys of the file that give way where a person types the key on the left: the two exclude each other.
GIVES_WAY = {
    "data.streaming": ("training.num_train_epochs",),
    "data.hold_out": ("data.files.validation", "data.splits.validation"),
    **dict.fromkeys(("data.files.validation", "data.splits.validation"), ("data.hold_out",)),
}


class Override(NamedTuple):
    """A value for a dotted key, and the command-line word that gives it."""

    value: Any
    word: str


Overrides = dict[str, Override]
"""Overrides by their dotted keys, in full and in the order in which they were given."""


def parse(words: Iterable[str], task: Any) -> Overrides:
    """Return the overrides in `words`: dotted keys, split at the first "=", with values read as flow YAML.

    `task` is the recipe's own, whose class knows the short names of data. Raises UserError for a word without "=", a
    key given twice, and a value that is no YAML.
    """
    parsed: Overrides = {}
    for word in words:
        short, equals, text = word.partition("=")
        if not equals or not all(short.split(".")):
            way_on = ", for example training.learning_rate=2e-5"
            if os.path.isfile(word):  # noqa: PTH113 (a Path raises for a word that is too long for a name)
                way_on = f"; next: data.train={word}"
            raise UserError(f"'{word}' is not an override; allowed: key=value{way_on}")
        key = in_full(short, task)
        if key in parsed:
            raise UserError(f"command line: {key} is given twice; give it once")
        if key.count(".") > DEEPEST:
            raise UserError(f"command line: '{key[:40]}…' has {key.count('.'):,} dots; allowed: up to {DEEPEST}")
        parsed[key] = Override(_value(key, text), word)
    return parsed


def of_values(values: Mapping[str, Any]) -> Overrides:
    """Return overrides of plain values by their dotted keys, each with the command-line word that would give it.

    A value that is an override already is kept.
    """
    words = {key: f"{key}={json.dumps(value)}" for key, value in values.items() if not isinstance(value, Override)}
    return {key: Override(value, words[key]) if key in words else value for key, value in values.items()}


def lay(document: Document, overrides: Overrides) -> Document:
    """Return a copy of `document` with `overrides` laid over it.

    Raises UserError for a key below a plain value.
    """
    laid = dataclasses.replace(document, values=copy.deepcopy(document.values), overridden=frozenset(overrides))
    if isinstance(laid.values.get("data"), dict):
        _replace_source(laid.values["data"], list(overrides))
    if "model" in overrides:
        laid.values.pop("model_type", None)  # that of the file's own model
    for key, override in overrides.items():
        for other in GIVES_WAY.get(key, ()) if override.value else ():
            if other not in overrides:
                _drop(laid.values, other)
        _put(laid.values, key, override.value)
    # What the file says at these keys, and below them, is not there any more.
    gone = {line for line in laid.lines for key in overrides if line == key or line.startswith(f"{key}.")}
    laid.lines = {key: line for key, line in laid.lines.items() if key not in gone}
    return laid


def in_full(key: str, task: Any) -> str:
    """Return the dotted key of a short name for the user's data: `data.train` is a file, `data.text` a column.

    A key of the task's own `data` is never read as a column.
    """
    section, _, last = key.partition(".")
    if section != "data" or "." in last or task not in tasks.names():
        return key
    data: Any = tasks.find(task).recipe_class.model_fields["data"].annotation
    known = data.model_fields
    if last in known:
        return key
    if last in SHORT:
        return f"data.files.{last}"
    if "columns" in known and last in known["columns"].annotation.model_fields:
        return f"data.columns.{last}"
    return key


# What Hugging Face's example scripts and other trainers call a key, and its name here.
ALSO_CALLED = {
    **dict.fromkeys(("model_name", "model_name_or_path", "base_model"), "model"),
    **dict.fromkeys(("train_file", "train_data"), "data.train"),
    **dict.fromkeys(("validation_file", "eval_file", "eval_data"), "data.validation"),
    **dict.fromkeys(("test_file", "test_data"), "data.test"),
    **dict.fromkeys(("dataset", "dataset_name"), "data.hub"),
    **dict.fromkeys(("dataset_config", "dataset_config_name"), "data.config"),
    **dict.fromkeys(("text_column", "text_column_name"), "data.text"),
    **dict.fromkeys(("label_column", "label_column_name"), "data.label"),
    "max_train_samples": "data.rows.train",
    "max_eval_samples": "data.rows.validation",
    "max_seq_length": "max_length",
    **dict.fromkeys(("epochs", "num_epochs"), "training.num_train_epochs"),
    **dict.fromkeys(("steps", "num_steps"), "training.max_steps"),
    "lr": "training.learning_rate",
    **dict.fromkeys(("batch_size", "train_batch_size"), "training.per_device_train_batch_size"),
    "eval_batch_size": "training.per_device_eval_batch_size",
}


def called_here(key: str) -> str:
    """Return the dotted key for what a person called `key`, which is none; empty where nothing is known of it."""
    section, _, name = key.replace("-", "_").rpartition(".")
    field = name in training_section.fields() and name not in training_section.ELSEWHERE and section != "training"
    return ALSO_CALLED.get(name, f"training.{name}" if field else "")


# A line of YAML that is one of these alone begins a text of several lines, and is empty: here it is a separator.
BLOCKS = ("|", ">")


def _value(key: str, text: str) -> Any:
    """Return `text` as YAML. A mapping needs braces: `translate English to German: ` is a text."""
    if text in BLOCKS:
        return text
    try:
        value = plain(text)
    except yaml.YAMLError as error:
        shown = text if len(text) <= SHOWN else f"{text[:10]}…"
        raise UserError(f"command line: {key}: '{shown}' is not valid YAML: {problem(error)}") from error
    return text if isinstance(value, dict) and not text.lstrip().startswith("{") else value


def _put(values: Values, key: str, value: Any) -> None:
    """Set the dotted `key`, and make the sections on the way to it."""
    *sections, last = key.split(".")
    here = values
    for depth, section in enumerate(sections):
        inner = here.setdefault(section, {})
        if inner is None:
            inner = here[section] = {}
        if not isinstance(inner, dict):
            above = ".".join(sections[: depth + 1])
            came = f"{above} is a value here ({inner!r}), not a section with keys"
            raise UserError(f"command line: {key}: {came}; next: {above}=VALUE")
        here = inner
    here[last] = copy.deepcopy(value)


def _drop(values: Any, key: str) -> None:
    """Leave out the dotted `key`, where it is there."""
    *sections, last = key.split(".")
    for section in sections:
        values = (values.get(section) if isinstance(values, dict) else None) or {}
    if isinstance(values, dict):
        values.pop(last, None)


def _replace_source(data: Values, keys: list[str]) -> None:
    """Drop the recipe's data source, and what belongs to it alone, where the overrides' `keys` name another.

    A single training file is split: a tenth of its rows becomes the validation split.
    """
    for source in SOURCES:
        if not any(key == f"data.{source}" or key.startswith(f"data.{source}.") for key in keys):
            continue
        for other in [other for other in SOURCES if other != source and other in data]:
            for key in (other, *SOURCES[other], *OF_A_SOURCE, *(("columns",) if source == "folder" else ())):
                data.pop(key, None)
    given = {key for key in keys if key.startswith("data.files")}
    if given == {"data.files.train"} and "validation" not in (data.get("files") or {}):
        data.setdefault("hold_out", HELD_OUT)
