"""What the verbs share: options, and how the parser calls them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from typer import Argument, Option

import hf_mps
from hf_mps.core.errors import LARGEST_BATCH
from hf_mps.finetune.recipe import catalogue

T = TypeVar("T")


def _version(asked: bool) -> None:
    if asked:
        print(f"hf-mps {hf_mps.__version__}")
        raise typer.Exit


Version = Annotated[bool, Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")]
Json = Annotated[bool, Option("--json", help="Print one JSON object.")]
Task = Annotated[str | None, Option("--task", help="What the model learns, such as sft.")]
Target = Annotated[
    str, Argument(metavar="TARGET", help="A recipe's name or YAML file; with --task a hub id or a folder.")
]
Overrides = Annotated[list[str] | None, Argument(metavar="[KEY=VALUE]...", help="Changes keys of the recipe.")]
Torch = Annotated[
    str | None, Option("--torch", metavar="RELEASE", help="A PyTorch release. Default: the installed one.")
]
SavedModel = Annotated[
    str, Argument(metavar="RUN", help="A run's folder, one that save_pretrained wrote, or a name on the hub.")
]
SavedTask = Annotated[
    str | None, Option("--task", help="The task of a model that no run trained. Default: its files tell.")
]
Batch = Annotated[int | None, Option("--batch", min=1, max=LARGEST_BATCH, help="Rows computed at once.")]
Debug = Annotated[bool, Option("--debug", help="Show the whole traceback of a failure.")]


def recipe_names(incomplete: str) -> list[str]:
    """Recipes whose names begin so, for the shell's completion."""
    return [entry.name for entry in catalogue.entries() if entry.name.startswith(incomplete)]


RecipeName = Annotated[
    str,
    Argument(
        metavar="RECIPE", help="A recipe's name (hf-mps recipes list) or a YAML file.", autocompletion=recipe_names
    ),
]


def deferred(verb: Callable[..., int | None]) -> Callable[..., Callable[[], int | None]]:
    """The command that the parser calls in place of `verb`: it returns the call, and `main` makes it.

    The parser itself would turn a Ctrl-C within a command, and a reader that went away, into other errors and exit
    codes. Each has the option --debug, which `main` reads.
    """
    # Evaluated here: the parser takes a signature that a command brings with it as it is, names and all.
    signature = inspect.signature(verb, eval_str=True)
    debug = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)

    @functools.wraps(verb)
    def command(*args: Any, debug: bool, **kwargs: Any) -> Callable[[], int | None]:
        return functools.partial(verb, *args, **kwargs)

    command.__signature__ = signature.replace(parameters=[*signature.parameters.values(), debug])  # type: ignore[attr-defined]
    return described(command)


def described(command: Callable[..., T]) -> Callable[..., T]:
    """Return the command, its docstring's paragraphs as lines, which the help breaks at the terminal's width."""
    command.__doc__ = "\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))
    return command
