"""`hf-mps doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Json, deferred
from hf_mps.core.errors import UserError


@deferred
def doctor(
    trials: Annotated[
        bool, typer.Option("--trials", help="Also try the device for every fault that a guard knows; takes minutes.")
    ] = False,
    release: Annotated[
        str | None,
        typer.Option("--torch", metavar="RELEASE", help="Tell instead what another release of PyTorch would change."),
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell whether this machine is ready to train on Metal, and if not, what to type.

    Exit code 0 where all is well, 1 where something needs a repair. Paste its text into an issue report.

    Example: `hf-mps doctor`
    """
    from hf_mps.tools.doctor import run, run_upgrade

    if release is None:
        run(trials=trials, json=json)
        return
    if trials:
        raise UserError("--trials cannot be combined with --torch: it tries the installed release; give one of them")
    run_upgrade(release, json=json)
