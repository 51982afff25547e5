"""`hf-mps recipes`: list, show, copy, validate and explain the recipes; it imports no torch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import typer
from typer import Argument

from hf_mps.cli.options import RecipeName, deferred, recipe_names
from hf_mps.core.errors import MISUSE
from hf_mps.core.text import aligned
from hf_mps.finetune.recipe import catalogue

recipes = typer.Typer(no_args_is_help=True, help="The recipes that come with hf_mps.")


@recipes.command("list")
@deferred
def list_recipes() -> None:
    """List the recipes and what each trains.

    Example: `hf-mps recipes list`
    """
    print(*aligned((entry.name, entry.purpose) for entry in catalogue.entries()), sep="\n")


@recipes.command("show")
@deferred
def show_recipe(recipe: RecipeName) -> None:
    """Print a recipe's file, with its expected scores, commands and hardware.

    Example: `hf-mps recipes show glue/mrpc`
    """
    print(catalogue.find(recipe).path.read_text(encoding="utf-8"), end="")


@recipes.command("copy")
@deferred
def copy_recipe(
    recipe: RecipeName,
    file: Path | None = Argument(None, metavar="[FILE]", help="The new file. Default: the recipe's name with .yaml."),
) -> None:
    """Copy a recipe into a new file, for you to change.

    Example: `hf-mps recipes copy text-classification my.yaml`
    """
    written = shlex.quote(str(file or catalogue.own_name(recipe)))
    print(f"{catalogue.copy(recipe, file)} written; next: hf-mps finetune {written}")


@recipes.command("keys")
@deferred
def recipe_keys(recipe: RecipeName) -> None:
    """List every key of a recipe, with its default, its values and its meaning.

    Example: `hf-mps recipes keys glue/mrpc`
    """
    from hf_mps.finetune.recipe import resolve

    rows = [(key.name, key.default, key.kind, key.meaning) for key in resolve.keys_of_recipe(recipe)]
    print(*aligned(rows), sep="\n")


@recipes.command("validate")
@deferred
def validate_recipes(
    recipe: list[str] | None = Argument(
        None, metavar="[RECIPE]...", help="Names or YAML files. Default: all.", autocompletion=recipe_names
    ),
) -> int:
    """Print everything that is wrong with recipes, with file and line. Exit code 2 where anything is.

    Example: `hf-mps recipes validate glue/mrpc`
    """
    from hf_mps.finetune.run import checks

    wrong = 0
    for name in recipe or [entry.name for entry in catalogue.entries()]:
        problems = checks.problems(name)
        certain = [problem for problem in problems if not problem.unchecked]
        wrong += len(certain)
        for problem in certain:
            print(f"hf-mps: {problem}", file=sys.stderr)
        said = " as far as this installation can tell: "
        unchecked = "".join(f"{said}{problem}" for problem in problems if problem.unchecked)
        if not certain:
            print(f"{name} is valid{unchecked}")
    return MISUSE if wrong else 0
