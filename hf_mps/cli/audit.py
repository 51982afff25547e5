"""The command line of `hf-mps audit`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Json, Task


def audit(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET [KEY=VALUE]... | -- python SCRIPT [ARGUMENT]...",
            help="A recipe's name or YAML file with keys to change; with --task a hub id or a model's folder.",
        ),
    ],
    task: Task = None,
    torch_table: Annotated[
        Path | None, typer.Option("--torch-table", help="Another PyTorch release's native_functions.yaml.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List every operator, not only what was found.")] = False,
    json: Json = False,
    github: Annotated[bool, typer.Option("--github", help="Print GitHub annotations.")] = False,
    badge: Annotated[bool, typer.Option("--badge", help="Print a badge line for a README.")] = False,
    debug: Debug = False,
) -> Callable[[], None]:
    """Say which operators of a training step have a Metal kernel, without a Mac and without weights.

    Forward, loss, backward, clipping and optimizer. Exit code 0 where all run on Metal, 1 where the CPU takes some or
    Metal refuses some.
    """

    def work() -> None:
        from hf_mps.dryrun.audit import verb

        verb.run(words, task, torch_table, every=every, json=json, github=github, badge=badge)

    return work
