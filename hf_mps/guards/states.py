"""What each guard is doing, in words: the lines of hf_mps.guards.report()."""

from __future__ import annotations

from dataclasses import dataclass

from hf_mps.core.patching import table, waits_for
from hf_mps.guards.base import Guard
from hf_mps.guards.registry import GUARDS


@dataclass(frozen=True)
class State:
    """One line of the report; `state` is on, needless, waits, off by user, failed or acted; `acted` counts."""

    name: str
    state: str
    reason: str
    acted: int
    what: str
    issue: str
    until: str


@dataclass(frozen=True)
class Report:
    """Every guard with its state, in the catalogue's order; prints as a table."""

    guards: list[State]

    def __str__(self) -> str:
        return table((each.name, _shown(each), each.reason) for each in self.guards)


def state(guard: Guard) -> State:
    """Return the state of one guard; asks whether the fault is there, which uses the device."""

    def told(word: str, reason: str) -> State:
        return State(guard.name, word, reason, guard.times, guard.what, guard.issue, guard.until)

    if standing := GUARDS.standing(guard, "acted", 0):
        return told(*standing)
    if waiting := waits_for(GUARDS, guard.name):
        return told("waits", waiting)
    from hf_mps.device.choice import metal

    if not metal().value:
        return told("needless", metal().reason)
    verdict = guard.safely(guard.verdict)
    if verdict is None:
        return told("failed", guard.failure or "")
    return told("on" if verdict.value else "needless", verdict.reason)


def _shown(state: State) -> str:
    return f"acted, {state.acted}x" if state.state == "acted" else state.state
