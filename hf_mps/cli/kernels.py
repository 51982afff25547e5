"""`hf-mps kernels`: fetch, list, show and remove PyTorch's own Metal kernels; it imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_mps.cli.options import Debug, deferred
from hf_mps.core.errors import UserError

kernels = typer.Typer(no_args_is_help=True, help="PyTorch's own Metal kernels, for the simulated device.")

Releases = Annotated[list[str] | None, typer.Argument(metavar="[RELEASE]...", help="Releases of PyTorch, as 2.13.0.")]


@kernels.command("fetch")
@deferred
def fetch_kernels(
    releases: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RELEASE]...", help="Releases of PyTorch, as 2.13.0; default: the installed torch's."),
    ] = None,
    wheel: Annotated[
        list[Path] | None,
        typer.Option("--wheel", metavar="PATH", help="A macOS arm64 wheel of PyTorch, where there is no network."),
    ] = None,
    debug: Debug = False,
) -> None:
    """Take a release's Metal kernels from its macOS wheel, which your own pip downloads, into your cache.

    About 110 MB are downloaded and 80 MB kept. The wheel is compared with the sha256 that the package index states, and
    removed. What is here already and whole is not fetched again.
    """
    from hf_mps.kernels import fetch

    def say(line: str) -> None:
        print(line, flush=True)

    if releases and wheel:
        raise UserError("a RELEASE is fetched from the package index, --wheel is a file; next: one of the two")
    for path in wheel or ():
        fetch.from_wheel(path, say)
    for release in releases or ([] if wheel else [fetch.installed()]):
        fetch.fetch(release, say)
