"""Each guard and sentinel with its state and reason."""

from __future__ import annotations

import contextlib
import importlib

from hf_mps.doctor.finding import Finding, note, ok, problem
from hf_mps.guards.catalogue import INSTALLED_AFTER


def examine() -> list[Finding]:
    """The lines of `hf_mps.guards.report()`; a guard that could not be installed is a problem."""
    from hf_mps import guards

    _import_libraries()
    found = []
    for each in guards.report().guards:
        if each.state == "failed":
            found.append(problem(each.name, f"failed: {each.reason}", "pip install --upgrade hf-mps"))
        elif each.state == "off by user":
            found.append(note(each.name, f"off: {each.reason}; {each.what}", "unset HF_MPS_GUARDS"))
        else:
            found.append(ok(each.name, f"{each.state}: {each.reason}"))
    return found


def _import_libraries() -> None:
    """Import what the guards wait for, where it is installed: only then do they know what they have to do."""
    for name in INSTALLED_AFTER:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
