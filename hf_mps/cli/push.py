"""`hf-mps push`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mps.cli.options import Debug, deferred


@deferred
def push(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or one that hf-mps export wrote.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The repository on the hub, OWNER/NAME.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be sent.")] = False,
    debug: Debug = False,
) -> None:
    """Send a trained model with its card to the Hugging Face hub.

    Checkpoints, optimizer states and recipe.yaml, which holds paths of this machine, stay here. Without a token (hf
    auth login) it sends nothing and lists the files.

    Example: `hf-mps push runs/quickstart OWNER/quickstart --dry-run`
    """
    from hf_mps.tools.export.push import push as send

    send(run, name, private=private, dry_run=dry_run)
