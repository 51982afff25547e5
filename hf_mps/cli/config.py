"""The command line of `hf-mps config`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from hf_mps.cli.options import Debug


def config(
    config_file: Annotated[
        str | None,
        typer.Option("--config_file", metavar="PATH", help="Default: where accelerate launch looks for it."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take every default.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 where a repair is due.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Ask nothing and print one JSON object.")] = False,
    debug: Debug = False,
) -> Callable[[], None]:
    """Write or repair Accelerate's configuration for this Mac.

    Shows what changes and why, and keeps a backup; a file that it does not understand stays as it is.
    """

    def work() -> None:
        from hf_mps.doctor import accelerate_config

        accelerate_config.run(config_file, yes=yes, check=check, json=json)

    return work
