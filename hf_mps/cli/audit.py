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
            help="A recipe's name or YAML file with keys to change; with --task a hub model's name or a folder.",
        ),
    ],
    task: Task = None,
    release: Torch = None,
    torch_table: Annotated[
        Path | None, typer.Option("--torch-table", help="The native_functions.yaml of another PyTorch release.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List every operator, not only those with a finding.")] = False,
    json: Json = False,
    github: Annotated[bool, typer.Option("--github", help="Print GitHub annotations.")] = False,
    badge: Annotated[bool, typer.Option("--badge", help="Print a badge line for a README.")] = False,
    debug: Debug = False,
) -> None:
    """Find the operators of a training step that have no Metal kernel; it needs neither a Mac nor the model's weights.

    It covers forward pass, loss, backward pass, clipping and optimizer, and tells for each call whether it launches a
    Metal kernel or an MPSGraph, which is compiled for each shape. Exit code 0 where all run on Metal, 1 where some run
    on the CPU or are refused.

    Example: `hf-mps audit glue/mrpc`
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
