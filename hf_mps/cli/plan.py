"""`hf-mps plan`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Json, Overrides, Target, Task, Torch, deferred
from hf_mps.core import status
from hf_mps.core.errors import UserError


@deferred
def plan(
    target: Target,
    overrides: Overrides = None,
    memory: Annotated[
        str | None, typer.Option("--memory", help="The Mac: 16gb, or m2-pro-16gb. Default: this one.")
    ] = None,
    task: Task = None,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Tokens of a row. Default: what the recipe cuts rows to.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=2, help="Under FSDP: what each of so many processes holds.")
    ] = None,
    release: Torch = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a training fits into a Mac's memory, from a trace of one step, and what would make it fit.

    And what that step launches on a release: Metal kernels, or MPSGraphs that are compiled for each shape.
    Exit code 0 where it fits, 1 where macOS would swap or PyTorch would refuse.
    """
    from hf_mps.tools.dryrun import render
    from hf_mps.tools.dryrun.memory import plan as plan_memory
    from hf_mps.tools.dryrun.memory.machine import named
    from hf_mps.tools.dryrun.resolve import resolve_target

    machine = named(memory) if memory is not None else None
    if ranks is not None and release is not None:
        raise UserError("--torch says what a Mac launches, and --ranks is of other devices; give one of them")
    with status.shown("tracing a training step …"):
        if ranks is not None:
            from hf_mps.tools.dryrun.memory import sharded

            result = sharded.plan(resolve_target(target, overrides or [], task), ranks, machine, length=length)
        else:
            result = plan_memory(resolve_target(target, overrides or [], task), machine, length=length, release=release)
    from hf_mps.tools.dryrun.memory.fit import report

    render.show(report(result), render.form(json=json))
