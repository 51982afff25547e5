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
        str | None,
        typer.Option("--memory", metavar="MAC", help="Another Mac: 16gb, or m2-pro-16gb. Default: this one."),
    ] = None,
    task: Task = None,
    length: Annotated[
        int | None, typer.Option("--length", min=1, help="Tokens of a row. Default: the recipe's longest.")
    ] = None,
    ranks: Annotated[
        int | None, typer.Option("--ranks", min=2, help="Under FSDP: what each of N processes holds.")
    ] = None,
    release: Torch = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell whether a training fits into a Mac's memory, and what would make it fit.

    It traces one step, and also counts what that launches: Metal kernels, and MPSGraphs, which are compiled for each
    shape. Exit code 0 where it fits, 1 where macOS would swap or PyTorch would refuse.

    Example: `hf-mps plan sft/qlora --memory 16gb`
    """
    from hf_mps.tools.dryrun import render
    from hf_mps.tools.dryrun.memory import plan as plan_memory
    from hf_mps.tools.dryrun.memory.machine import named
    from hf_mps.tools.dryrun.resolve import resolve_target

    machine = named(memory) if memory is not None else None
    if ranks is not None and release is not None:
        raise UserError("--torch, which is for a Mac, cannot be combined with --ranks; give one of them")
    with status.shown("tracing a training step …"):
        if ranks is not None:
            from hf_mps.tools.dryrun.memory import sharded

            result = sharded.plan(resolve_target(target, overrides or [], task), ranks, machine, length=length)
        else:
            result = plan_memory(resolve_target(target, overrides or [], task), machine, length=length, release=release)
    from hf_mps.tools.dryrun.memory.fit import report

    render.show(report(result), render.form(json=json))
