"""`hf-mps finetune`; neither its command line nor a shell's completion imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer
from typer import Argument, Option

from hf_mps.cli.options import RecipeName, Version, deferred
from hf_mps.core.errors import UserError

if TYPE_CHECKING:
    from hf_mps.finetune.features.machine import MemoryAdjustments
    from hf_mps.finetune.run.stages import PreparedRun


def _keys(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys of the recipe on the command line that begin so, each with its =, for the shell's completion."""
    from hf_mps.finetune.recipe import resolve

    recipe = ctx.params.get("recipe")
    try:
        known = resolve.keys_of_recipe(str(recipe)) if recipe else []
    except UserError:
        return []
    return [f"{key.name}=" for key in known if key.name.startswith(incomplete)]


@deferred
def finetune(
    recipe: RecipeName,
    overrides: list[str] | None = Argument(
        None, metavar="[KEY=VALUE]...", help="Changes keys of the recipe.", autocompletion=_keys
    ),
    fresh: bool = Option(False, "--fresh", help="Train anew in a new folder; an earlier run of the recipe stays."),
    smoke: bool = Option(False, "--smoke", help="Try the recipe in a minute, with a tiny model and made-up rows."),
    plan: bool = Option(False, "--plan", help="Print every decision of the run with its reason, without training."),
    sweep: list[str] | None = Option(
        None,
        metavar="KEY=VALUE,VALUE… [KEY=…]...",
        help="Train once for each combination of the values and compare the runs.",
    ),
    check_parity: bool = Option(
        False, "--check-parity", help="First train three steps on the CPU and on Metal and compare."
    ),
    as_json: bool = Option(False, "--json", help="With --plan: print JSON."),
    version: Version = False,
) -> None:
    """Fine-tune a model by a recipe.

    KEY=VALUE changes a key for this run; values are YAML: training.learning_rate=2e-5. Your own data takes three keys:
    data.train=my.csv data.text=body data.label=topic. The run writes its files into output_dir, by default
    runs/RECIPE. The same command resumes a run that was stopped.

    Example: `hf-mps finetune quickstart`
    """
    asked = [name for name, on in (("--plan", plan), ("--smoke", smoke), ("--sweep", sweep)) if on]
    if len(asked) > 1:
        raise UserError(f"{asked[0]} cannot be combined with {asked[1]}; give one of them")
    if as_json and not plan:
        raise UserError("--json works only with --plan; a run writes results.json into its folder")
    if check_parity and asked:
        raise UserError(f"--check-parity cannot be combined with {asked[0]}; give one of them")
    from hf_mps.distributed.ranks import Ranks
    from hf_mps.distributed.voice import one_voice
    from hf_mps.finetune.recipe.resolve import load_recipe

    with one_voice():
        resolved = Ranks.here().run_on_all(lambda: load_recipe(recipe, overrides or []))
        if check_parity:
            from hf_mps.tools.dryrun import parity

            parity.require(resolved)
        if plan:
            from hf_mps.tools.dryrun import preview

            preview.show(resolved, fresh=fresh, as_json=as_json)
        elif sweep:
            from hf_mps.finetune.run.sweep import run_sweep

            run_sweep(resolved, sweep, _fit, fresh=fresh)
        else:
            from hf_mps.finetune.run import runner

            runner.run(resolved, _fit, fresh=fresh, smoke=smoke)


def _fit(run: PreparedRun) -> MemoryAdjustments:
    from hf_mps.tools.dryrun.memory import adjust  # which imports torch

    return adjust.estimate_fit(run)


def swept(argv: list[str]) -> list[str]:
    """`argv` with `--sweep a=1,2 b=3,4` as the parser wants it, `--sweep a=1,2 --sweep b=3,4`.

    Every word with a = that follows the option belongs to it, up to the next option. Behind `--` they are a script's.
    """
    words: list[str] = []
    sweeping = False
    for word in argv:
        if word.startswith("--"):
            sweeping = word == "--sweep" and "--" not in words
        elif sweeping and "=" in word and words[-1] != "--sweep":
            words.append("--sweep")
        words.append(word)
    return words
