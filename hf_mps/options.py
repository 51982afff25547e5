"""Options that several verbs have."""

from __future__ import annotations

from typing import Annotated

import typer

import hf_mps


def _version(asked: bool) -> None:
    if asked:
        print(f"hf-mps {hf_mps.__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a failure's whole traceback.")]
