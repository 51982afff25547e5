"""A recipe ready to run: file and overrides laid over each other and validated, with every mistake found."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue, overrides, training_section
from hf_mps.finetune.recipe.overrides import Overrides
from hf_mps.finetune.recipe.problems import Problem, clauses
from hf_mps.finetune.recipe.schema import Recipe, map_paths
from hf_mps.finetune.recipe.yaml import Document, read_yaml


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
        recipe = validate(overrides.lay(self.document, every))
        return dataclasses.replace(self, recipe=recipe, overrides=every)

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
    task = tasks.module(named)
    recipe, wrong_keys = None, []
    try:
        recipe = task.Recipe.model_validate(document.values)
        recipe._typed = document.overridden
    except ValidationError as error:
        wrong_keys = clauses(error, task.Recipe, document)
    for key in task.Recipe.TYPED_ALONE:
        if document.values.get(key) and key not in document.overridden:
            wrong_keys.append((key, f"is no key of a file, which cannot agree for its reader; next: type {key}=true"))
    unchecked = []
    if isinstance(training := document.values.get("training"), dict):
        source, settled = getattr(task, "ARGUMENTS", None), getattr(task, "SETTLED", None)
        try:
            fields = {str(key): value for key, value in training.items()}
            wrong_fields = training_section.problems(fields, source, settled, task=named)
            wrong_keys += [(f"training.{key}", text) for key, text in wrong_fields]
        except UserError as error:  # the library whose arguments they are is not installed
            text = f"cannot be checked: {error}"
            unchecked = [Problem(document.where("training"), "training", text, unchecked=True)]
    return recipe, [*(Problem(document.where(key), key, text) for key, text in wrong_keys), *unchecked]
