"""The guards of this process: which are on, what they did, and the table that says so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_mps.core.patching import Registry
from hf_mps.guards.base import Guard
from hf_mps.guards.catalogue import INSTALLED_AFTER, module

if TYPE_CHECKING:
    from hf_mps.guards.states import Report

GUARDS: Registry[Guard] = Registry("guard", module, "GUARD", INSTALLED_AFTER)
start, started, install, get, suspended = GUARDS.start, GUARDS.started, GUARDS.install, GUARDS.get, GUARDS.suspend


def acted() -> list[dict[str, object]]:
    """What the guards did in this process, as results.json has it: name, times, the lines that were said, the issue."""
    return [
        {"name": guard.name, "times": guard.times, "lines": list(guard.lines), "issue": guard.issue}
        for guard in GUARDS.that_acted()
    ]


def report() -> Report:
    """Return every guard with its state and reason. Asks each whether the fault is there, which uses the device.

    Switches the layer on where nothing has yet, as any program that imports torch does.
    """
    from hf_mps.activation.activate import activate
    from hf_mps.guards.states import Report, state

    activate()

    return Report([state(get(name)) for name in GUARDS.names])
