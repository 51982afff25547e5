"""Keeps a Mac awake while a run is in progress."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hf_mps.core.choice import Choice
from hf_mps.metal.device import machine

PROGRAM = "caffeinate"


def decide() -> Choice[str] | None:
    """Return how sleep is held off, or None on a machine without macOS's program for it, which is no Mac."""
    if not machine.present().mac or shutil.which(PROGRAM) is None:
        return None
    return Choice("held off", f"{PROGRAM} -is, until the run ends")


@contextmanager
def awake() -> Iterator[None]:
    """Keep the Mac awake while the context lasts; do nothing where `decide` returns None.

    -i prevents idle sleep, -s any sleep on mains power, -w ends the program with this process however it ends (man
    caffeinate). It gets a process group of its own: Ctrl-C in the terminal is meant for the run, which saves first.
    """
    if decide() is None:
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
