"""The command lines of `hf-mps finetune` and `hf-mps recipes`; neither they nor a shell's completion import torch."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Version, deferred
from hf_mps.core.errors import MISUSE, UserError


def _names(incomplete: str) -> list[str]:
    """Recipes whose names begin so, for the shell's completion."""
    from hf_mps.finetune.recipe import catalogue

    return [entry.name for entry in catalogue.entries() if entry.name.startswith(incomplete)]


def _keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys of the recipe on the command line that begin so, each with its =, for the shell's completion."""
    from hf_mps.finetune.recipe import keys

    recipe = ctx.params.get("recipe")
    try:
        known = keys.of_recipe(str(recipe)) if recipe else []
    except UserError:
        return []
    return [f"{key.name}=" for key in known if key.name.startswith(incomplete)]


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe's name (hf-mps recipes list) or a YAML file.", autocompletion=_names
    ),
]


@deferred
def finetune(
    recipe: RecipeName,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe with other values.", autocompletion=_keys),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Train anew, beside an earlier run of the same recipe, never over it.")
    ] = False,
    smoke: Annotated[
        bool,
        typer.Option("--smoke", help="Try the recipe out in a minute: a tiny model of its architecture, made-up rows."),
    ] = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Print everything that the run would decide, and why, without training.")
    ] = False,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="KEY=VALUE,VALUE… [KEY=…]...",
            help="Run once for each combination of the values, one after the other, and compare.",
        ),
    ] = None,
    check_parity: Annotated[
        bool, typer.Option("--check-parity", help="First train three steps on the CPU and on Metal: do they agree?")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --plan: print it as JSON.")] = False,
    version: Version = False,
    debug: Debug = False,
) -> None:
    """Fine-tune a model as a recipe says.

    Keys are dotted and values are YAML: training.learning_rate=2e-5. Data of your own needs no file of keys:
    data.train=my.csv data.text=body data.label=topic. The run's files are in output_dir, by default runs/RECIPE; the
    same command goes on with a run that was stopped.
    """
    asked = [name for name, on in (("--plan", plan), ("--smoke", smoke), ("--sweep", sweep)) if on]
    if len(asked) > 1:
        raise UserError(f"{asked[0]} and {asked[1]} are two things to ask for; give one of them")
    if as_json and not plan:
        raise UserError("--json belongs to --plan; a run leaves results.json in its folder")
    if check_parity and asked:
        raise UserError(f"--check-parity belongs to a run, and {asked[0]} is another thing; leave one of them out")
    from hf_mps.finetune.recipe.resolve import load_recipe

    resolved = load_recipe(recipe, overrides or [])
    if check_parity:
        from hf_mps.dryrun import parity

        parity.require(resolved)
    if plan:
        from hf_mps.dryrun import preview

        preview.show(resolved, fresh=fresh, as_json=as_json)
    elif sweep:
        from hf_mps.finetune.run import sweep as sweeps

        sweeps.run(resolved, sweep, fresh=fresh)
    else:
        from hf_mps.finetune.run import runner

        runner.run(resolved, fresh=fresh, smoke=smoke)


recipes = typer.Typer(no_args_is_help=True, help="The recipes that come with hf_mps.")


@recipes.command("list")
@deferred
def list_recipes(debug: Debug = False) -> None:
    """List the recipes with what each is for."""
    from hf_mps.finetune.recipe import catalogue

    entries = catalogue.entries()
    width = max((len(entry.name) for entry in entries), default=0)
    for entry in entries:
        print(f"{entry.name:<{width}}  {entry.purpose}")


@recipes.command("show")
@deferred
def show_recipe(recipe: RecipeName, debug: Debug = False) -> None:
    """Print a recipe as it is written."""
    from hf_mps.finetune.recipe import catalogue

    print(catalogue.find(recipe).path.read_text(encoding="utf-8"), end="")


@recipes.command("copy")
@deferred
def copy_recipe(
    recipe: RecipeName,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Where to; default: the recipe's name here, as .yaml.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a recipe's YAML into a file of your own, to change it. Never over a file that is there."""
    from hf_mps.finetune.recipe import catalogue

    print(f"{catalogue.copy(recipe, file)} written; next: hf-mps finetune {_quoted(file, recipe)}")


@recipes.command("keys")
@deferred
def recipe_keys(recipe: RecipeName, debug: Debug = False) -> None:
    """List every key that a recipe may have, with its default and what it takes."""
    from hf_mps.finetune.recipe import keys
    from hf_mps.finetune.report.screen.tables import aligned

    for line in aligned([(key.name, key.default, key.kind) for key in keys.of_recipe(recipe)]):
        print(line)


@recipes.command("validate")
@deferred
def validate_recipes(
    recipe: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE]...", help="Names or YAML files; default: all.", autocompletion=_names),
    ] = None,
    debug: Debug = False,
) -> int:
    """Tell everything that is wrong with recipes, with file and line. Exit code 2 where anything is."""
    from hf_mps.finetune.recipe import catalogue
    from hf_mps.finetune.run import checks

    wrong = 0
    for name in recipe or [entry.name for entry in catalogue.entries()]:
        problems = checks.problems(name)
        told = [problem for problem in problems if not problem.unchecked]
        wrong += len(told)
        for problem in told:
            print(f"hf-mps: {problem}", file=sys.stderr)
        unchecked = "".join(f" as far as this installation can tell: {one}" for one in problems if one.unchecked)
        if not told:
            print(f"{name} is valid{unchecked}")
    return MISUSE if wrong else 0


def _quoted(file: Path | None, recipe: str) -> str:
    from hf_mps.finetune.recipe import catalogue

    return shlex.quote(str(file or catalogue.own_name(recipe)))


def swept(argv: list[str]) -> list[str]:
    """`argv` with `--sweep a=1,2 b=3,4` as the parser wants it, `--sweep a=1,2 --sweep b=3,4`.

    Every word with a = that follows the option belongs to it, up to the next option.
    """
    found: list[str] = []
    sweeping = False
    for word in argv:
        if word.startswith("--"):
            sweeping = word == "--sweep"
        elif sweeping and "=" in word and found[-1] != "--sweep":
            found.append("--sweep")
        found.append(word)
    return found
