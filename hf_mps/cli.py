"""The verbs of hf_mps as one command, `hf-mps`. Starting it, its help and its lists import no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import hf_mps
from hf_mps.audit.command import audit
from hf_mps.configure.command import config
from hf_mps.doctor.command import doctor
from hf_mps.errors import UserError, run_command

Work = Callable[[], None]

# Each command hands back its work instead of doing it: the parser would turn a Ctrl-C into an error of its own.
app = typer.Typer(add_completion=False, no_args_is_help=True, help="Hugging Face training on a Mac's GPU.")
recipes = typer.Typer(no_args_is_help=True, help="The recipes that come with hf_mps.")
app.add_typer(recipes, name="recipes")


def main(argv: Sequence[str] | None = None, *, program: str = "hf-mps") -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code; see `hf_mps.errors`."""
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["run"] and given[1:] not in ([], ["--help"]):
        from hf_mps import run

        # Past the parser: every word behind the script is the script's, and so are its errors.
        return run.main(given[1:])
    codes: list[int] = []

    def command() -> None:
        work = _parse(given, program)
        if callable(work):
            work()
        else:
            codes.append(int(work or 0))

    return run_command(command, debug="--debug" in given) or sum(codes)


def _parse(argv: list[str], program: str) -> Work | int | None:
    """The work that `argv` asks for, or an exit code where the parser did it all. Raises UserError for misuse."""
    # `python -m hf_mps.finetune` is one verb: its help and errors are to name it as it was called.
    verb = argv[:1] if program != "hf-mps" else []
    commands = typer.main.get_command(app)
    parser = commands.commands[verb[0]] if verb else commands  # type: ignore[attr-defined]
    try:
        result: Work | int | None = parser.main(args=argv[len(verb) :], prog_name=program, standalone_mode=False)
    except Exception as error:
        # typer ships a click of its own since 0.26 and used the other before: both know a usage error by this method.
        words = getattr(error, "format_message", None)
        if words is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help itself
            print(words(), file=sys.stderr)
            return 2
        first = " ".join(words().split()).rstrip(".")
        raise UserError(f"{first}; next: {program} --help") from error
    return result


def _version(asked: bool) -> None:
    if asked:
        print(f"hf-mps {hf_mps.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a failure's whole traceback.")]


@app.callback()
def _top(version: Version = False, debug: Debug = False) -> None:
    """Hugging Face training on a Mac's GPU: correct, fast and effortless."""


@app.command()
def finetune(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe's name (hf-mps recipes list) or a YAML file.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe with other values.")
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
    as_json: Annotated[bool, typer.Option("--json", help="With --plan: print it as JSON.")] = False,
    version: Version = False,
    debug: Debug = False,
) -> Work:
    """Fine-tune a model as a recipe says.

    Keys are dotted and values are YAML: training.learning_rate=2e-5. Data of your own needs no file of keys:
    data.train=my.csv data.text=body data.label=topic. The run's files are in output_dir, by default runs/RECIPE; the
    same command goes on with a run that was stopped.
    """

    def work() -> None:
        if as_json and not plan:
            raise UserError("--json belongs to --plan; a run leaves results.json in its folder")
        if plan and smoke:
            raise UserError("--plan and --smoke are two things to ask for; give one of them")
        if plan:
            from hf_mps.finetune import preview

            preview.show(recipe, overrides or [], fresh=fresh, as_json=as_json)
            return
        from hf_mps.finetune import runner

        runner.run(recipe, overrides or [], fresh=fresh, smoke=smoke)

    return work


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[
        list[str], typer.Argument(metavar="[-m MODULE | SCRIPT | torchrun … | accelerate launch …] [ARGUMENT]...")
    ],
) -> Work:
    """Run a training script with hf_mps on, as plain Python runs it.

    Needed where PyTorch does not load hf_mps itself (TORCH_DEVICE_BACKEND_AUTOLOAD=0) and for launchers.
    """
    raise AssertionError("main() runs it")


app.command()(audit)
app.command()(config)
app.command()(doctor)


@recipes.command("list")
def list_recipes(debug: Debug = False) -> Work:
    """List the recipes with what each is for."""

    def work() -> None:
        from hf_mps.finetune import catalogue

        entries = catalogue.entries()
        width = max((len(entry.name) for entry in entries), default=0)
        for entry in entries:
            print(f"{entry.name:<{width}}  {entry.purpose}")

    return work


@recipes.command("show")
def show_recipe(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe's name or a YAML file.")],
    debug: Debug = False,
) -> Work:
    """Print a recipe as it is written, once it has been validated."""

    def work() -> None:
        from hf_mps.finetune import catalogue, order

        order.load(recipe)
        print(catalogue.find(recipe).path.read_text(encoding="utf-8"), end="")

    return work


if __name__ == "__main__":
    sys.exit(main())
