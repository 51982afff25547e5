"""The command line of `hf-mps doctor`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a failure's whole traceback.")] = False,
) -> Callable[[], None]:
    """Say whether this machine is ready to train on Metal, and if not, what to type.

    Exit code 0 where all is well, 1 where something was found. The text is what an issue report needs.
    """

    def work() -> None:
        from hf_mps import doctor as room

        room.run(json=json)

    return work
