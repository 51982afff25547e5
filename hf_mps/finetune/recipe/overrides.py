"""A recipe's values: its YAML with the line of every key, and a command line's `key=value` words laid over it."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hf_mps.core.errors import UserError
from hf_mps.core.text import first_line
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import training_section
from hf_mps.finetune.recipe.schema import SHORT, SOURCES

Values = dict[str, Any]
DEEPEST = 20
FLOAT = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
# More than any key takes: 64 bits have 19.
DIGITS = 18
# Characters of a wrong value that a line repeats.
SHOWN = 200


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars. PyYAML reads 1.1, where `no` is false, `2e-5` is text, `010` is 8 and `1:30` is 90."""


# SafeLoader's resolvers are those of YAML 1.1, so this class begins with none.
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+", list("-+0123456789")),
    ("float", FLOAT, list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


@dataclass
class Document:
    """A recipe before validation: its values, and where each dotted key was given.

    `path` is None for a recipe without a file; `overridden` holds the dotted keys of the command line.
    """

    values: Values
    path: Path | None = None
    lines: dict[str, int] = field(default_factory=dict)
    overridden: frozenset[str] = frozenset()
    twice: list[tuple[int, str]] = field(default_factory=list)
    """Keys given again, of which YAML keeps the last: the line, and the whole sentence."""

    def where(self, key: str) -> str:
        """Return the origin of `key`: `command line`, or the file with the line of the key or the nearest section
        around it.
        """
        parts = key.split(".")
        for end in range(len(parts), 0, -1):
            around = ".".join(parts[:end])
            if around in self.overridden:
                return "command line"
            if around in self.lines:
                return f"{self.path}:{self.lines[around]}"
        if any(other.startswith(f"{key}.") for other in self.overridden):  # a section that the command line began
            return "command line"
        return str(self.path) if self.path else "command line"


def read_yaml(path: Path, *, lenient: bool = False) -> Document:
    """Read the recipe at `path`. Raises UserError for a file that cannot be read, is no YAML or repeats a key.

    With `lenient` repeated keys are left in `twice` for the caller to report.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    try:
        values = plain(text)
        lines: dict[str, int] = {}
        twice: list[tuple[int, str]] = []
        _walk(yaml.compose(text, Loader=_Loader), "", lines, twice)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise UserError(f"{place}: is not valid YAML: {problem(error)}") from error
    if not isinstance(values, dict):
        kind = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{path}: a recipe is a mapping of keys to values, this file holds {kind}")
    if twice and not lenient:
        line, words = twice[0]
        raise UserError(f"{path}:{line}: {words}")
    return Document(values, path, lines, twice=twice)


def plain(text: str) -> Any:
    """Return `text` as YAML 1.2: dicts, lists, text, numbers, true, false and None. Raises yaml.YAMLError."""
    # First what no recipe needs and no reader handles well: values nested deeper than any recipe's or inside themselves
    # (PyYAML parses without recursion but builds values with it), tags that ask for another type, and the character 0,
    # which no path may have.
    open_anchors: list[str | None] = []
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            open_anchors.append(event.anchor)
        elif isinstance(event, yaml.CollectionEndEvent):
            open_anchors.pop()
        if wrong := _odd(event, open_anchors):
            mark: Any = event.start_mark
            raise yaml.composer.ComposerError(None, None, wrong, mark)
    return yaml.load(text, Loader=_Loader)


def _odd(event: Any, open_anchors: Sequence[str | None]) -> str:
    """Return what is odd about a parser's event inside collections of these anchors, as a clause; empty for nothing."""
    if len(open_anchors) > DEEPEST:
        return f"values more than {DEEPEST} deep; write it flatter"
    if isinstance(event, yaml.AliasEvent) and event.anchor in open_anchors:
        return f"*{event.anchor} contains itself; write it flatter"
    # int() refuses from 4,300 digits on, and a float holds none of more than 308.
    digits = event.value.lstrip("+-") if getattr(event, "implicit", False) == (True, False) else ""
    if len(digits) > DIGITS and digits.isdigit():
        return f"an integer of {len(digits):,} digits; allowed: up to {DIGITS}, or the digits in quotation marks"
    if isinstance(event, yaml.ScalarEvent) and "\0" in event.value:
        return "a text with the character 0; leave it out"
    if getattr(event, "tag", None) not in (None, "!", "tag:yaml.org,2002:str"):
        return f"a tag, {event.tag}; allowed: plain values"
    return ""


def _walk(node: yaml.Node | None, prefix: str, lines: dict[str, int], twice: list[tuple[int, str]]) -> None:
    """Note the line of every key below `node`, and each repeated key: YAML would drop the first silently."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        key = f"{prefix}{key_node.value}"
        line = key_node.start_mark.line + 1
        if key in lines:
            twice.append((line, f"{key} is given twice, first in line {lines[key]}; give it once"))
        lines.setdefault(key, line)
        _walk(value_node, f"{key}.", lines, twice)


def problem(error: yaml.YAMLError) -> str:
    """Return what is wrong with a text that is no YAML, as a clause, and what is allowed."""
    words = first_line(getattr(error, "problem", None) or error)
    return words if "; " in words else f"{words}; allowed: a value of YAML, or a text in quotation marks"


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
