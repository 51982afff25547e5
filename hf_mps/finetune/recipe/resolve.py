"""A recipe as a person gave it, made ready to run: file and command line laid over each other, every mistake found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError, nearest
from hf_mps.finetune import tasks
from hf_mps.finetune.recipe import catalogue, paths, training_section, yaml
from hf_mps.finetune.recipe.problems import SHORT, Problem, in_words
from hf_mps.finetune.recipe.schema import SOURCES, Recipe
from hf_mps.finetune.recipe.yaml import Document, Values

# What the rows' source brings with it: dropped where the command line names another. A folder's columns have names of
# their own too, those of the task.
OF_A_SOURCE = ("rows", "labels", "hold_out")
HELD_OUT = 0.1


@dataclass(frozen=True)
class Order:
    """A recipe ready to run: validated, with the name it goes by and the dotted keys that the command line changed.

    `words` are the command line's own: the recipe and its overrides, as they were typed. `smoke` says what a smoke run
    has in place of the recipe's model, None for a real run.
    """

    name: str
    recipe: Recipe
    changed: tuple[str, ...]
    words: tuple[str, ...] = ()
    smoke: Choice[str] | None = None


def load(name: str, overrides: Sequence[str] = ()) -> Order:
    """Find the recipe called `name` (or the YAML file of that path), lay `overrides` over it and validate it.

    Raises UserError, which says the file and line or the command line, the dotted key, what came and what is allowed.
    """
    entry = catalogue.find(name)
    said = read(entry.path, overrides)
    return Order(entry.name, validate(said), tuple(sorted(said.overridden)), (name, *overrides))


def problems(name: str, overrides: Sequence[str] = ()) -> list[Problem]:
    """Everything that is wrong with the recipe called `name` and `overrides`, each told with file and line.

    More than a run would tell at first: keys said twice, files and folders that are not there. Where a library is not
    installed, what it alone could tell is left `unchecked`. Imports no torch.
    """
    try:
        path = catalogue.find(name).path
        said = read(path, overrides, lenient=True)
    except UserError as error:
        return [Problem("", "", str(error))]
    found = [Problem(f"{path}:{line}", "", words) for line, words in said.twice]
    recipe, wrong = examine(said)
    found += wrong
    for key, check in _checks(recipe, said).items() if recipe is not None else ():
        try:
            check()
        except UserError as error:
            found.append(Problem(said.where(key), "", str(error)))
    return [one for place, one in enumerate(found) if one.text not in [before.text for before in found[:place]]]


def _checks(recipe: Recipe, said: Document) -> dict[str, Callable[[], object]]:
    """What a run refuses of a valid recipe before it reads a row, by the key that is to blame."""
    from hf_mps.finetune.data import load as data
    from hf_mps.finetune.models import checkpoint
    from hf_mps.finetune.recipe import expect
    from hf_mps.finetune.run import checks as refusals
    from hf_mps.finetune.text import chat

    checks: dict[str, Callable[[], object]] = {
        "model": lambda: checkpoint.resolve(recipe.model),
        "model_type": lambda: refusals.refuse_another_type(recipe.model_type, checkpoint.resolve(recipe.model)),
        "data": lambda: data.check(recipe.data),
        "expect": lambda: expect.refuse_unknown(recipe, sorted(said.overridden)),
        "training.metric_for_best_model": lambda: expect.refuse_unknown_best(recipe),
        "early_stopping_patience": lambda: refusals.refuse_early_stopping(
            recipe.training, recipe.early_stopping_patience
        ),
    }
    if (template := getattr(recipe, "chat_template", None)) not in (None, paths.PLAIN):
        checks["chat_template"] = lambda: chat.written(template)
    return checks


def read(path: Path, overrides: Sequence[str] = (), *, lenient: bool = False) -> Document:
    """What the file at `path` says with `overrides` laid over it. Raises UserError where either is malformed.

    With `lenient` a key said twice in the file is left in the document's `twice`.
    """
    said = yaml.read(path, lenient=lenient)
    # Paths of the file are relative to it; those of the command line stay with the user's folder.
    paths.changed(said.values, lambda name: path.parent / Path(name).expanduser())
    overrides = [_in_full(argument, said) for argument in overrides]
    if isinstance(said.values.get("data"), dict):
        _replace_source(said.values["data"], overrides)
    yaml.override(said, overrides)
    return said


def validate(said: Document) -> Recipe:
    """The recipe that `said` holds, in the class of its task. Raises UserError: the first problem, the others' keys."""
    recipe, found = examine(said)
    if recipe is None or found:
        more = f" (also wrong: {', '.join(problem.key for problem in found[1:])})" if found[1:] else ""
        raise UserError(f"{found[0]}{more}")
    return recipe


def examine(said: Document) -> tuple[Recipe | None, list[Problem]]:
    """The recipe that `said` holds, or None, and everything that is wrong with it, in the order of its class's keys."""
    try:
        task = tasks.module(_task(said))
    except UserError as error:
        return None, [Problem(said.where("task"), "", str(error))]
    recipe, problems = None, []
    try:
        recipe = task.Recipe.model_validate(said.values)
    except ValidationError as error:
        problems = in_words(error, task.Recipe, said)
    training = said.values.get("training")
    if isinstance(training, dict):
        source, settled = getattr(task, "ARGUMENTS", None), getattr(task, "SETTLED", None)
        try:
            fields = {str(key): value for key, value in training.items()}
            wrong = training_section.problems(fields, source, settled, task=said.values["task"])
        except UserError as error:  # the library whose arguments they are is not installed
            unchecked = Problem(said.where("training"), "training", f"cannot be checked: {error}", unchecked=True)
            return recipe, [*(Problem(said.where(key), key, text) for key, text in problems), unchecked]
        problems += [(f"training.{key}", text) for key, text in wrong]
    return recipe, [Problem(said.where(key), key, text) for key, text in problems]


def _task(said: Document) -> str:
    """The task that `said` names. Raises UserError without a place, where there is no such task."""
    names, task = tasks.names(), said.values.get("task")
    if not isinstance(task, str) or task not in names:
        came = "is missing" if task is None else f"is {task!r}"
        raise UserError(f"task {came}; allowed: {', '.join(names)}{nearest(str(task), names)}")
    return task


def _in_full(argument: str, said: Document) -> str:
    """An override with the short names of one's own data in full: `data.train=` is a file, `data.text=` a column.

    A key that the task's `data` has itself is never read as a column.
    """
    key, equals, value = argument.partition("=")
    section, _, last = key.partition(".")
    if section != "data" or "." in last or not equals or said.values.get("task") not in tasks.names():
        return argument
    known = tasks.module(said.values["task"]).Recipe.model_fields["data"].annotation.model_fields
    if last in known:
        return argument
    if last in SHORT:
        return f"data.files.{last}={value}"
    if "columns" in known and last in known["columns"].annotation.model_fields:
        return f"data.columns.{last}={value}"
    return argument


def _replace_source(data: Values, overrides: Sequence[str]) -> None:
    """Drop the recipe's source of data, and what belongs to it alone, where the command line names another.

    A training file alone is split: a tenth of its rows becomes the validation split.
    """
    keys = {argument.partition("=")[0] for argument in overrides}
    for source in SOURCES:
        if not any(key == f"data.{source}" or key.startswith(f"data.{source}.") for key in keys):
            continue
        others = [other for other in SOURCES if other != source and other in data]
        for other in others:
            for key in (other, *SOURCES[other], *OF_A_SOURCE, *(("columns",) if source == "folder" else ())):
                data.pop(key, None)
    given = {key for key in keys if key.startswith("data.files")}
    if given == {"data.files.train"} and "validation" not in (data.get("files") or {}):
        data.setdefault("hold_out", HELD_OUT)
