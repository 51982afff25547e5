"""A recipe ready to run: file and overrides laid over each other and validated, every mistake put in words.

The keys that a recipe may have, by task, are read from the classes that validate them.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue, overrides, training_section
from hf_mps.finetune.recipe.overrides import SHOWN, Document, Overrides, read_yaml
from hf_mps.finetune.recipe.schema import SHORT, Recipe, map_paths
from hf_mps.finetune.recipe.training_section import TRAINING_ARGUMENTS

# pydantic's kinds of error (docs.pydantic.dev, "Validation Errors") in words of YAML, with the bound that each carries.
ALLOWED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a section of keys, such as {{a: b}}",
    "model_type": "a section of keys, such as {{a: b}}",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
    "too_short": "at least {min_length} of them",
    "string_too_short": "at least {min_length} letter",
}
INSTEAD = {
    "link": (
        "was removed: gradients are sent whole at every step; leave it out (in a script of your own,"
        " accelerate's DistributedDataParallelKwargs(comm_hook=…) compresses them and its LocalSGD averages weights)"
    ),
    "speedups": "is called optimizations now; next: optimizations=false or true",
    "device": "is no key of a recipe; next: HF_MPS_DEVICE=cpu, or cuda or mps, before the command",
    "data.broken_rows": "is called data.max_bad_row_fraction now; next: data.max_bad_row_fraction=0.001",
}
"""What earlier releases or other tools have as a key, with what to do instead."""
# The last part of an error's place where a value may be of several types: the type that was tried, no key.
TRIED = re.compile(r"(str|int|float|bool|list|dict|literal)(\[.*\])?")


@dataclass(frozen=True)
class Problem:
    """A mistake: its origin (`my.yaml:3`, `command line`), the dotted key, and what is wrong."""

    where: str
    key: str
    text: str
    unchecked: bool = False
    """Nothing is known to be wrong: the library that would say so is not installed."""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, f"{self.key} {self.text}".strip())))


def clauses(error: ValidationError, kind: type[BaseModel], document: Document) -> list[tuple[str, str]]:
    """Return the dotted key and a clause for each mistake; a value that fits none of several types is one mistake."""
    by_key: dict[str, list[str]] = {}
    for details in error.errors():
        parts = [str(part) for part in details["loc"] if part != "[key]"]
        if len(parts) > 1 and TRIED.fullmatch(parts[-1]):
            parts.pop()
        key, clause = ".".join(parts) or "the recipe", _clause(details, kind, document)
        said = by_key.setdefault(key, [clause])
        # `is 3; allowed: text` and `is 3; allowed: a list` become one clause.
        came, allowed, more = clause.partition("; allowed: ")
        if allowed and said[0].startswith(came + allowed) and clause != said[0] and more not in said:
            said.append(more)
    return [(key, " or ".join(said)) for key, said in by_key.items()]


def _clause(details: ErrorDetails, kind: type[BaseModel], document: Document) -> str:
    location, value = details["loc"], details.get("input")
    if details["type"] == "extra_forbidden":
        if (dotted := ".".join(map(str, location))) in INSTEAD:
            return INSTEAD[dotted]
        typed = document.where(dotted) == "command line"
        section, _, last = (other := overrides.called_here(dotted)).rpartition(".")
        if other and (section == "training" or last in _names(kind, section)):
            full = overrides.in_full(other, document.values.get("task"))
            return f"is not a key here; {f'next: {other}={_shown(value)}' if typed else f'it is called {full}'}"
        allowed = _names(kind, ".".join(map(str, location[:-1])), typed=typed)
        return f"is not a key here; allowed: {', '.join(allowed)}{nearest(str(location[-1]), allowed)}"
    if details["type"] == "missing":
        return "is missing; give it"
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    # A mapping's key is what is wrong, and is at the end of the dotted name.
    if "[key]" in location or details["type"] == "invalid_key":
        return "is not text; allowed: keys that are text"
    if details["type"] == "literal_error":
        values = details["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
        return f"is {_shown(value)}; allowed: {values}{nearest(str(value), values.split(', '))}"
    words = ALLOWED.get(details["type"])
    allowed_words = words.format(**details.get("ctx", {})) if words else details["msg"].removeprefix("Input should be ")
    if location in (("data",), ("data", "files")) and isinstance(value, str):
        return f"is {_shown(value)}; allowed: {allowed_words}; next: data.train={value}"
    return f"is {_shown(value)}; allowed: {allowed_words}"


def _shown(value: Any) -> str:
    """Return a given value as YAML."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


def _names(kind: type[BaseModel], section: str, *, typed: bool = True) -> list[str]:
    """Return the keys of a section; where they are `typed`, the short names of files and columns too."""
    keys = _keys(kind, tuple(filter(None, section.split("."))))
    if section == "data" and typed:
        keys += [*SHORT, *(_keys(kind, ("data", "columns")) if "columns" in keys else ())]
    return keys


def _keys(kind: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Return the keys that the section at `location` knows."""
    here: type[BaseModel] = kind
    for part in location:
        field = here.model_fields.get(str(part))
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)] if field else []
        sections = [t for t in inner if issubclass(t, BaseModel)]
        if not sections:
            break
        here = sections[0]
    return list(here.model_fields)


@dataclass(frozen=True)
class ResolvedRecipe:
    """A validated recipe with its name and the overrides that it contains, by their dotted keys.

    `given` is the user's word for it, a name or a file; `document` holds what its file says. `smoke` says what replaces
    the recipe's model in a smoke run, None for a real run.
    """

    name: str
    recipe: Recipe
    given: str
    document: Document = field(repr=False)
    overrides: Overrides = field(default_factory=dict)
    smoke: Choice[str] | None = None

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the dotted keys whose values differ from the file's."""
        return tuple(sorted(self.overrides))

    @property
    def words(self) -> tuple[str, ...]:
        """Return the command-line words that name this recipe: the typed ones, and those of later overrides."""
        return (self.given, *(override.word for override in self.overrides.values()))

    def command(self, verb: str, *options: str) -> str:
        """Return the command line of a verb for this recipe, quoted for a shell; `options` replace earlier values."""
        given = {key for key, equals, _ in (option.partition("=") for option in options) if equals}
        words = [word for word in self.words if word.partition("=")[0] not in given]
        return shlex.join(["hf-mps", verb, *words, *options])

    def with_overrides(self, values: Mapping[str, Any]) -> ResolvedRecipe:
        """Return this recipe with other `values` by their dotted keys, validated; they win over earlier overrides.

        A value may be one that `parse` returned. Raises UserError for what the recipe refuses.
        """
        further = overrides.of_values(values)
        every = {key: override for key, override in self.overrides.items() if key not in further} | further
        return dataclasses.replace(self, recipe=validate(overrides.lay(self.document, every)), overrides=every)

    def parse(self, words: Sequence[str]) -> Overrides:
        """Return further command-line words as overrides of this recipe, not yet validated. Raises UserError."""
        return overrides.parse(words, self.document.values.get("task"))

    def in_full(self, key: str) -> str:
        """Return the dotted key that a person means by `key`: `data.files.train` for `data.train`."""
        return overrides.in_full(key, self.document.values.get("task"))


def load_recipe(name: str, words: Sequence[str] = ()) -> ResolvedRecipe:
    """Find the recipe called `name` (or the YAML file of that path), lay the overrides `words` over it, and validate
    it.

    Raises UserError, which names file and line or the command line, the dotted key, the given value and the allowed
    ones.
    """
    entry = catalogue.find(name)
    document = read(entry.path)
    typed = overrides.parse(words, document.values.get("task"))
    return ResolvedRecipe(entry.name, validate(overrides.lay(document, typed)), name, document, typed)


def read(path: Path, *, lenient: bool = False) -> Document:
    """Return the content of the file at `path`, with its paths relative to it. Raises UserError where it is malformed.

    With `lenient` a repeated key is only noted in the document's `twice`. Paths of a command line are no part of it and
    stay relative to the user's folder.
    """
    document = read_yaml(path, lenient=lenient)
    map_paths(document.values, lambda name: path.parent / Path(name).expanduser())
    return document


def validate(document: Document) -> Recipe:
    """Return the recipe in `document`, in its task's class. Raises UserError: the first problem, and the others'
    keys.
    """
    recipe, problems = examine(document)
    if recipe is None or problems:
        more = f" (also wrong: {', '.join(problem.key for problem in problems[1:])})" if problems[1:] else ""
        raise UserError(f"{problems[0]}{more}")
    return recipe


def examine(document: Document) -> tuple[Recipe | None, list[Problem]]:
    """Return the recipe in `document`, or None, and everything that is wrong with it, in the order of its keys."""
    names, named = tasks.names(), document.values.get("task")
    if not isinstance(named, str) or named not in names:
        came = "is missing" if named is None else f"is {named!r}"
        wrong = f"task {came}; allowed: {', '.join(names)}{nearest(str(named), names)}"
        return None, [Problem(document.where("task"), "", wrong)]
    task = tasks.find(named)
    recipe, wrong_keys = None, []
    try:
        recipe = task.recipe_class.model_validate(document.values)
        recipe._typed = document.overridden
    except ValidationError as error:
        wrong_keys = clauses(error, task.recipe_class, document)
    for key in task.recipe_class.TYPED_ALONE:
        if document.values.get(key) and key not in document.overridden:
            wrong_keys.append((key, f"is no key of a file, which cannot agree for its reader; next: type {key}=true"))
    unchecked = []
    if isinstance(training := document.values.get("training"), dict):
        try:
            fields = {str(key): value for key, value in training.items()}
            how = (task.arguments_source, task.settled, named, overrides.called_here)
            wrong_fields = training_section.problems(fields, *how)
            wrong_keys += [(f"training.{key}", text) for key, text in wrong_fields]
        except UserError as error:  # the library whose arguments they are is not installed
            text = f"cannot be checked: {error}"
            unchecked = [Problem(document.where("training"), "training", text, unchecked=True)]
    return recipe, [*(Problem(document.where(key), key, text) for key, text in wrong_keys), *unchecked]


@dataclass(frozen=True)
class Key:
    """A dotted key: its values in words, its default as YAML (empty where the key is required), and what it means."""

    name: str
    kind: str
    default: str
    meaning: str


def training_keys(task: str) -> list[Key]:
    """Return the fields that `training` takes for a task. Raises UserError where their library is not installed."""
    kind = tasks.find(task)
    known = training_section.fields(kind.arguments_source or TRAINING_ARGUMENTS)
    refused = training_section.set_elsewhere(kind.settled, known)
    free = [field for name, field in known.items() if name not in refused]
    return [Key(f"training.{one.name}", training_section.allowed(one), "", one.meaning) for one in free]


def keys_of_recipe(recipe: str) -> list[Key]:
    """Return every key that the recipe called `recipe`, or any of that task, may have.

    Raises UserError where there is neither such a recipe nor such a task.
    """
    task = recipe if recipe in tasks.names() else read_yaml(catalogue.find(recipe).path).values.get("task")
    if task not in tasks.names():
        raise UserError(f"{recipe} has no task")
    found = [*keys_of_class(tasks.find(task).recipe_class), *training_keys(task)]
    return [replace(key, kind=task) if key.name == "task" else key for key in found]


def keys_of_class(kind: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a recipe's class other than `training`, in their order; dotted ones of a section."""
    for name, key_field in kind.model_fields.items():
        kinds = (one for one in _union(key_field.annotation) if isinstance(one, type) and issubclass(one, BaseModel))
        if (section := next(kinds, None)) is not None:
            yield from keys_of_class(section, f"{prefix}{name}.")
        if section is not None or name == "training":
            continue
        value = None if key_field.is_required() else key_field.get_default(call_default_factory=True)
        default = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        default = "" if key_field.is_required() else "empty" if value in ([], {}) else default
        meaning = " ".join((key_field.description or "").split())
        yield Key(f"{prefix}{name}", _type_words(key_field.annotation), default, meaning)


def _union(annotation: Any) -> list[Any]:
    """Return the members of a union without None; a plain type alone."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [one for one in get_args(annotation) if one is not type(None)]
    return [annotation]


def _type_words(annotation: Any) -> str:
    """Return a type in plain words: `integer`, `list of text`, the values of a Literal."""
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any"}
    parts = []
    for kind in _union(annotation):
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Annotated:
            parts.append(_type_words(inner[0]))
        elif origin is Literal:
            parts.append(", ".join(map(str, inner)))
        elif origin is list:
            parts.append(f"list of {_type_words(inner[0])}")
        elif origin is dict:
            parts.append(f"mapping of {_type_words(inner[0])} to {_type_words(inner[1])}")
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            parts.append(f"sections of {', '.join(kind.model_fields)}")
        else:
            parts.append(plain.get(kind, getattr(kind, "__name__", str(kind))))
    return " or ".join(parts)
