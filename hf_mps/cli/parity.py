"""`hf-mps parity`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Json, Overrides, Target, Task, deferred
from hf_mps.core import status


@deferred
def parity(
    target: Target,
    overrides: Overrides = None,
    task: Task = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps on each device.")] = 3,
    rows: Annotated[int | None, typer.Option("--rows", min=1, help="Rows of a batch. Default: the recipe's.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the same steps on the CPU and on Metal, and tell whether they agree, or which module disagrees first.

    Exit code 0 where they agree within the tolerance of the precision and the difference of two runs on the device, 1
    where they do not.

    Example: `hf-mps parity quickstart`
    """
    from hf_mps.tools.dryrun import render
    from hf_mps.tools.dryrun.parity import parity as compare
    from hf_mps.tools.dryrun.resolve import resolve_target

    with status.shown("training the same steps on the CPU and on the device …"):
        result, facts = compare(resolve_target(target, overrides or [], task), steps, rows)
    from hf_mps.tools.dryrun.parity.compare import report

    render.show(report(target, result, facts), render.form(json=json))
