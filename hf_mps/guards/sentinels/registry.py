"""The sentinels of this process: which are on, what they found, and the table that says so."""

from __future__ import annotations

from dataclasses import dataclass

from hf_mps.core.patching import Registry, table
from hf_mps.guards.sentinels.base import Sentinel
from hf_mps.guards.sentinels.catalogue import INSTALLED_AFTER, module

SENTINELS: Registry[Sentinel] = Registry("sentinel", module, "SENTINEL", INSTALLED_AFTER)
start, install, get, suspended = SENTINELS.start, SENTINELS.install, SENTINELS.get, SENTINELS.suspend


@dataclass(frozen=True)
class State:
    """One line of the report; `state` is on, off by user, needless, failed or found; `found` counts."""

    name: str
    state: str
    reason: str
    found: int
    what: str


@dataclass(frozen=True)
class Report:
    """Every sentinel with its state, in the catalogue's order; prints as a table."""

    sentinels: list[State]

    def __str__(self) -> str:
        return table(
            (each.name, f"found, {each.found}x" if each.state == "found" else each.state, each.reason)
            for each in self.sentinels
        )


def found() -> list[dict[str, object]]:
    """What the sentinels found in this process, as results.json has it: name, times, the lines that were said."""
    return [{"name": each.name, "times": each.times, "lines": list(each.lines)} for each in SENTINELS.that_acted()]


def report() -> Report:
    """Return every sentinel with its state and reason; asks nothing of the device.

    Switches the layer on where nothing has yet, as any program that imports torch does.
    """
    from hf_mps.activation.activate import activate

    activate()
    return Report([_state(get(name)) for name in SENTINELS.names])


def _state(sentinel: Sentinel) -> State:
    word, reason = SENTINELS.standing(sentinel, "found", -1) or ("on", sentinel.why)
    return State(sentinel.name, word, reason, sentinel.times, sentinel.what)
