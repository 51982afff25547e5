"""`hf-mps doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Json, deferred


@deferred
def doctor(
    trials: Annotated[
        bool, typer.Option("--trials", help="Also try the device for every fault that a guard knows; some minutes.")
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether this machine is ready to train on Metal, and if not, what to type.

    Exit code 0 where all is well, 1 where something was found. The text is what an issue report needs.
    """
    from hf_mps.doctor import run

    run(trials=trials, json=json)
