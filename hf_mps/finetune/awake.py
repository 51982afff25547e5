"""Keeps a Mac from going to sleep while a run goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hf_mps.choice import Choice
from hf_mps.device import machine

PROGRAM = "caffeinate"


def decide() -> Choice[bool] | None:
    """Whether sleep is held off, and how; None on a machine that is no Mac, which has no such program."""
    if not machine.present().mac:
        return None
    if shutil.which(PROGRAM) is None:
        return Choice(False, f"{PROGRAM} is not on the PATH, so the Mac may go to sleep during the run")
    return Choice(True, f"{PROGRAM} -is holds it off until the run ends")


@contextmanager
def held() -> Iterator[None]:
    """Hold sleep off as long as the context lasts; where `decide` says no, do nothing.

    -i keeps the system from idle sleep, -s from any on mains power, -w ends the program with this process however it
    ends (man caffeinate). A process group of its own: a Ctrl-C in the terminal is for the run, which saves first.
    """
    chosen = decide()
    if chosen is None or not chosen.value:
        yield
        return
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        [PROGRAM, "-is", "-w", str(os.getpid())], stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        yield
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait()
