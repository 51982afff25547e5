"""The verdict on Metal that a process leaves to those that it starts, in an environment variable.

A spawned DataLoader worker imports the script and its libraries anew, which ask for Metal again; eight of them would
each open the GPU for a trial. Only a process that made a trial leaves anything.
"""

from __future__ import annotations

import json
import os
from importlib import metadata

from hf_mps.core.choice import Choice
from hf_mps.device.machine import Machine

VARIABLE = "_HF_MPS_PROBED"
"""Not a user's to set: `hf_mps.core.settings` has those."""


def leave(here: Machine, verdict: Choice[bool]) -> None:
    """Let processes that are started from now on know what a trial on this machine found."""
    told = {"by": os.getpid(), "of": _of(here), "value": verdict.value, "reason": verdict.reason}
    os.environ[VARIABLE] = json.dumps(told)


def verdict(here: Machine) -> Choice[bool] | None:
    """Return what a trial on this machine, with this torch, found in a process that started this one; else None."""
    try:
        left = json.loads(os.environ.get(VARIABLE, ""))
        if left["by"] != os.getpid() and left["of"] == _of(here):
            return Choice(bool(left["value"]), str(left["reason"]))
    except (ValueError, KeyError, TypeError):
        pass
    return None


def _of(here: Machine) -> list[str | None]:
    return [here.chip, here.macos, metadata.version("torch")]
