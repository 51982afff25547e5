"""`hf-mps doctor`."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_mps.cli.options import Debug, Json, deferred
from hf_mps.core.errors import UserError


@deferred
def doctor(
    trials: Annotated[
        bool, typer.Option("--trials", help="Also try the device for every fault that a guard knows; some minutes.")
    ] = False,
    release: Annotated[
        str | None,
        typer.Option("--torch", metavar="RELEASE", help="Say what this release of PyTorch would change, instead."),
    ] = None,
    peers: Annotated[
        bool, typer.Option("--peers", help="Measure the link to each HOST of a run on several machines, instead.")
    ] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Answer the --peers of other machines until Ctrl-C, instead.")
    ] = False,
    hosts: Annotated[list[str] | None, typer.Argument(metavar="[HOST]...", help="Where --serve runs.")] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether this machine is ready to train on Metal, and if not, what to type.

    Exit code 0 where all is well, 1 where something was found. The text is what an issue report needs.
    """
    if peers or serve or hosts:
        _links(peers, serve, hosts or [], beside=trials or release is not None, json=json)
        return
    from hf_mps.doctor import run, run_upgrade

    if release is None:
        run(trials=trials, json=json)
        return
    if trials:
        raise UserError("--trials tries the installed torch, --torch reads about another; give one of them")
    run_upgrade(release, json=json)


def _links(asks: bool, serve: bool, hosts: list[str], *, beside: bool, json: bool) -> None:
    """Answer or ask the other machines of a run. Raises UserError for words that do not go together."""
    from hf_mps.doctor import peers

    if beside:
        raise UserError("--peers and --serve look at links alone; leave --trials and --torch out")
    if serve:
        if asks or hosts:
            raise UserError("--serve answers, --peers asks; next, here: hf-mps doctor --serve, and --peers elsewhere")
        peers.serve()
    elif not asks:
        raise UserError(f"doctor has '{hosts[0]}'; next, to measure the link to it: hf-mps doctor --peers {hosts[0]}")
    elif not hosts:
        raise UserError("--peers names no machine; next: hf-mps doctor --peers HOST, with --serve running there")
    else:
        peers.run(hosts, json=json)
