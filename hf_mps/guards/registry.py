"""The guards of this process: which are on, what they did, and the table that says so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING

from hf_mps.errors import UserError, nearest
from hf_mps.guards import notice
from hf_mps.guards.catalogue import INSTALLED_AFTER, NAMES
from hf_mps.guards.guard import Guard

if TYPE_CHECKING:
    from hf_mps.guards.states import Report

_guards: dict[str, Guard] = {}
_off: frozenset[str] = frozenset()
_started = False


def start(off: frozenset[str] = frozenset()) -> None:
    """Install the guards that concern torch itself; `off` names those that the user wants off. Once in a process.

    Those that concern a library follow when it is imported (hf_mps.integrations.guards).
    """
    global _off, _started
    if _started:
        return
    _started, _off = True, off
    install(sys.modules["torch"])


def started() -> bool:
    """Whether the guards were switched on in this process."""
    return _started


def install(module: ModuleType) -> None:
    """Install the guards that the catalogue names for `module`; one that fails costs itself alone, in one notice."""
    for name in INSTALLED_AFTER.get(module.__name__, ()) if _started else ():
        guard = get(name)
        if guard.off_by_user:
            continue
        try:
            guard.install(module)
        except Exception as error:
            guard.failure = f"does not know this version of {module.__name__}: {type(error).__name__}: {error}"
            notice.say(f"the guard {name} is not on: it {guard.failure}")


def get(name: str) -> Guard:
    """Return a guard by its name. Raises UserError for one that there is not."""
    if name not in NAMES:
        raise UserError(f"{name} is no guard; there are {', '.join(NAMES)}{nearest(name, NAMES)}")
    if name not in _guards:
        guard: Guard = importlib.import_module(f"hf_mps.guards.{name.replace('-', '_')}").GUARD
        guard.off_by_user = name in _off
        _guards[name] = guard
    return _guards[name]


@contextmanager
def suspended(*names: str) -> Iterator[None]:
    """Switch single guards off for a while, or all of them where no name is given. Raises UserError for no guard."""
    guards = [get(name) for name in names or NAMES]
    for guard in guards:
        guard.suspended += 1
        guard.switched(False)
    try:
        yield
    finally:
        for guard in guards:
            guard.suspended -= 1
            guard.switched(guard.on)


def acted() -> list[dict[str, object]]:
    """What the guards did in this process, as results.json has it: name, times, the lines that were said, the issue."""
    return [
        {"name": guard.name, "times": guard.times, "lines": list(guard.lines), "issue": guard.issue}
        for guard in (_guards[name] for name in NAMES if name in _guards)
        if guard.times
    ]


def report() -> Report:
    """Return every guard with its state and reason. Asks each whether the fault is there, which uses the device.

    Switches the layer on where nothing has yet, as any program that imports torch does.
    """
    from hf_mps.activate import activate
    from hf_mps.guards.states import Report, state

    activate()

    return Report([state(get(name)) for name in NAMES])
