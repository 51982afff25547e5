"""`hf-mps audit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Json, Task, Torch, deferred
from hf_mps.core import status
from hf_mps.core.errors import UserError


@deferred
def audit(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET [KEY=VALUE]... | -- python SCRIPT [ARGUMENT]...",
            help="A recipe's name or YAML file with keys to change; with --task a hub id or a model's folder.",
        ),
    ],
    task: Task = None,
    release: Torch = None,
    torch_table: Annotated[
        Path | None, typer.Option("--torch-table", help="Another PyTorch release's native_functions.yaml.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List every operator, not only what was found.")] = False,
    json: Json = False,
    github: Annotated[bool, typer.Option("--github", help="Print GitHub annotations.")] = False,
    badge: Annotated[bool, typer.Option("--badge", help="Print a badge line for a README.")] = False,
    debug: Debug = False,
) -> None:
    """Say which operators of a training step have a Metal kernel, without a Mac and without weights.

    Forward, loss, backward, clipping and optimizer; and what each call launches: a Metal kernel, or an MPSGraph that is
    compiled for each shape. Exit code 0 where all run on Metal, 1 where the CPU takes some or
    Metal refuses some.
    """
    from hf_mps.tools.dryrun import render
    from hf_mps.tools.dryrun.audit import audit as audit_target
    from hf_mps.tools.dryrun.audit import audit_script, is_command
    from hf_mps.tools.dryrun.resolve import resolve_target

    form = render.form(json=json, github=github, badge=badge)
    if is_command(words):
        if task is not None:
            raise UserError("--task is for a model, not for a script; leave it out")
        result = audit_script(words, torch_table, release)
    else:
        with status.shown("tracing a training step …"):
            result = audit_target(resolve_target(words[0], words[1:], task), torch_table, release)
    from hf_mps.tools.dryrun.audit.record import report

    render.show(report(result, every=every), form)
