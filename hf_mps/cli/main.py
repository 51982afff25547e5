"""The verbs of hf_mps as one command, `hf-mps`. Starting it, its help and its lists import no torch."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer import Argument

from hf_mps.cli.bench import bench
from hf_mps.cli.doctor import config, doctor
from hf_mps.cli.dryrun import audit, parity, plan
from hf_mps.cli.export import export, push
from hf_mps.cli.finetune import finetune, swept
from hf_mps.cli.kernels import kernels
from hf_mps.cli.options import Debug, Version, described
from hf_mps.cli.recipes import recipes
from hf_mps.cli.saved import chat, evaluate, predict
from hf_mps.core import notices
from hf_mps.core.errors import UserError, run_command
from hf_mps.core.extras import unheard

Work = Callable[[], int | None] | int | None
app = typer.Typer(no_args_is_help=True, help="Hugging Face training on a Mac's GPU.")


def main(argv: Sequence[str] | None = None, *, program: str = "hf-mps") -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code; see `hf_mps.core.errors`.

    A `program` that ends in a verb's name (`python -m hf_mps.finetune`) is that verb: its help and errors name it so.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    # Where the shell has closed stderr, print(file=None) would write what is for people among the answers on stdout.
    sys.stderr = sys.stderr or io.StringIO()
    if words[:1] == ["run"] and words[1:] not in ([], ["--help"]):
        from hf_mps.layer.activation import run

        # Past the parser: every word behind the script is the script's, and so are its errors.
        return run.main(words[1:])
    codes: list[int] = []

    def verb() -> None:
        work = _parse(swept(words), program)
        try:
            codes.append(int((work() if callable(work) else work) or 0))
        except typer.Abort as stop:  # what its questions make of a Ctrl-C
            raise KeyboardInterrupt from stop

    with unheard("bitsandbytes"), notices.redirected(notices.on_stderr):
        return run_command(verb, debug="--debug" in words) or sum(codes)


def _parse(argv: list[str], program: str) -> Work:
    """The work that `argv` asks for, or an exit code where the parser did it all. Raises UserError for misuse."""
    verb = [word for word in argv[:1] if program.endswith(f".{word}")]
    parser: Any = typer.main.get_command(app)
    if verb:
        parser = parser.commands[verb[0]]
    try:
        work: Work = parser.main(args=argv[len(verb) :], prog_name=program, standalone_mode=False)
    except Exception as error:
        # typer ships its own click since 0.26 and used the other before: both know a usage error by this method.
        if (words := getattr(error, "format_message", None)) is None:
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the help itself
            print(words(), file=sys.stderr)
            return 2
        first, context = " ".join(words().split()).rstrip("."), getattr(error, "ctx", None)
        # Keys of a recipe are typed without dashes, those of Hugging Face's examples with two.
        option = getattr(error, "option_name", None)
        if option and context and any(parameter.name == "overrides" for parameter in context.command.params):
            from hf_mps.finetune.recipe.overrides import called_here

            if key := called_here(option.lstrip("-")):
                raise UserError(f"No such option: {option}; next: {key}=VALUE") from error
        # An option without its value is refused without a context.
        named = [word for word in argv[:1] if not verb and word in parser.commands]
        path = context.command_path if context else " ".join([program, *named])
        raise UserError(f"{first}; next: {path} --help") from error
    return work


@app.callback()
def _top(version: Version = False, debug: Debug = False) -> None:
    """Hugging Face training on a Mac's GPU: correct, fast and effortless."""


# First: the help lists the verbs in the order in which they are added.
app.command()(finetune)


@app.command(context_settings={"ignore_unknown_options": True})
@described
def run(
    words: Annotated[
        list[str],
        Argument(
            metavar="[-m MODULE | SCRIPT | torchrun … | accelerate launch …] [ARGUMENT]...",
            help="The script's command.",
        ),
    ],
) -> None:
    """Run a training script with hf_mps on.

    Plain `python script.py` does the same, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps PyTorch from loading hf_mps.

    Example: `hf-mps run accelerate launch script.py`
    """
    raise AssertionError("main() runs it")


for verb in (audit, bench, chat, config, doctor, evaluate, export, parity, plan, predict, push):
    app.command()(verb)
app.add_typer(kernels, name="kernels")
app.add_typer(recipes, name="recipes")
