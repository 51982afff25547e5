"""Each guard and sentinel with its state and reason."""

from __future__ import annotations

import contextlib
import importlib

from hf_mps.doctor.finding import Finding, note, ok, problem
from hf_mps.guards.catalogue import INSTALLED_AFTER

IDLE = ("needless", "waits", "on")


def examine() -> list[Finding]:
    """The lines of `hf_mps.guards.report()`; a guard that could not be installed is a problem.

    Without Metal the many that have nothing to do are one line.
    """
    from hf_mps import guards
    from hf_mps.device import choice

    _import_libraries()
    found = []
    states, metal = guards.report().guards, choice.metal().value
    idle = [each for each in states if not metal and each.state in IDLE]
    for each in states:
        if each in idle:
            continue
        if each.state == "failed":
            found.append(problem(each.name, f"failed: {each.reason}", "pip install --upgrade hf-mps"))
        elif each.state == "off by user":
            found.append(note(each.name, f"off: {each.reason}; {each.what}", "unset HF_MPS_GUARDS"))
        else:
            found.append(ok(each.name, f"{each.state}: {each.reason}"))
    if idle:
        found.append(ok("idle", f"{len(idle)} guards have nothing to do: the hazards are Metal's, and there is none"))
    return found


def _import_libraries() -> None:
    """Import what the guards wait for, where it is installed: only then do they know what they have to do."""
    for name in INSTALLED_AFTER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
