"""`hf-mps config`: Accelerate's configuration file for a Mac."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_mps.cli.options import Debug, deferred


@deferred
def config(
    config_file: Annotated[
        str | None,
        typer.Option("--config_file", metavar="PATH", help="Default: where accelerate launch looks for it."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take every default.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 where a repair is due.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Ask nothing and print one JSON object.")] = False,
    debug: Debug = False,
) -> None:
    """Write or repair Accelerate's configuration for this Mac.

    Shows what changes and why, and keeps a backup; a file that it does not understand stays as it is.
    """
    from hf_mps.doctor.accelerate_config import file, wizard

    path = Path(config_file).expanduser() if config_file else file.default_place()
    if check:
        wizard.check(path, json=json)
    else:
        wizard.run(path, yes=yes or json, json=json)
