"""What the verbs share: options, and how the parser calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

import hf_mps


def _version(asked: bool) -> None:
    if asked:
        print(f"hf-mps {hf_mps.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Task = Annotated[str | None, typer.Option("--task", help="What the model TARGET is to learn.")]
Target = Annotated[
    str, typer.Argument(metavar="TARGET", help="A recipe's name or YAML file; with --task a hub id or a folder.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe with other values.")
]
Torch = Annotated[
    str | None, typer.Option("--torch", metavar="RELEASE", help="The PyTorch release. Default: the installed one.")
]
SavedModel = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, one that save_pretrained wrote, or a name on the hub.")
]
SavedTask = Annotated[
    str | None, typer.Option("--task", help="What a model without a run is for. Default: what its files tell.")
]
# A larger batch is a slip of the keyboard, and would be collected before anything is said.
Batch = Annotated[int | None, typer.Option("--batch", min=1, max=1_000_000, help="Rows that are computed at once.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show a failure's whole traceback.")]


def recipe_names(incomplete: str) -> list[str]:
    """Recipes whose names begin so, for the shell's completion."""
    from hf_mps.finetune.recipe import catalogue

    return [entry.name for entry in catalogue.entries() if entry.name.startswith(incomplete)]


RecipeName = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A recipe's name (hf-mps recipes list) or a YAML file.", autocompletion=recipe_names
    ),
]


def deferred(verb: Callable[..., int | None]) -> Callable[..., Callable[[], int | None]]:
    """The command that the parser calls in place of `verb`: it returns the call, and `main` makes it.

    The parser turns a Ctrl-C within a command, and a reader that went away, into errors and exit codes of its own.
    """

    @functools.wraps(verb)
    def command(*args: Any, **kwargs: Any) -> Callable[[], int | None]:
        return functools.partial(verb, *args, **kwargs)

    return command
