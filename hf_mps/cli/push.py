"""`hf-mps push`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mps.cli.options import Debug, deferred


@deferred
def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or one that hf-mps export made.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The repository on the hub: OWNER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private, if it is made now.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Send nothing; print what would be sent.")] = False,
    debug: Debug = False,
) -> None:
    """Send a trained model with its card to the Hugging Face hub.

    Checkpoints, optimizer states and the recipe's file with this machine's paths stay here. Without a token (hf auth
    login) nothing is sent, and what would be is listed.
    """
    from hf_mps.tools.export.push import push as send

    send(run, name, private=private, dry_run=dry_run)
