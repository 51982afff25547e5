"""The command line of `hf-mps plan`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Json, Overrides, Target, Task


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
    json: Json = False,
    debug: Debug = False,
) -> Callable[[], None]:
    """Say whether a training fits into a Mac's memory, from a trace of one step, and what would make it fit.

    Exit code 0 where it fits, 1 where macOS would swap or PyTorch would refuse.
    """

    def work() -> None:
        from hf_mps.core import status
        from hf_mps.core.errors import RunError
        from hf_mps.dryrun.memory import machine, report
        from hf_mps.dryrun.memory import plan as make
        from hf_mps.dryrun.resolve import find

        named = machine.named(memory) if memory is not None else None
        with status.shown("tracing a training step …"):
            found = make(find(target, overrides or [], task), named, length=length)
        print(report.for_programs(found) if json else report.for_people(found))
        if found.verdict != "fits":
            size = report.gib(found.estimate.bytes)
            raise RunError(f"plan: {size} {found.verdict} on {found.machine.name}")

    return work
