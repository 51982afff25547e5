"""What the guards and sentinels of this process do, in words: which are on, what they did, and the table of it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hf_mps.core.text import aligned
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.catalogue import GUARDS, registry
from hf_mps.layer.guards.sentinels.stream import Sentinel
from hf_mps.metal.device.choice import metal

start, get = registry().start, registry().get


@dataclass(frozen=True)
class State:
    """One line of the report; `acted` counts what a guard did, or what a sentinel found.

    `state` is on, needless, waits, off by user, failed, acted or, of a sentinel, found.
    """

    name: str
    state: str
    reason: str
    acted: int
    what: str
    issue: str = ""
    until: str = ""


@dataclass(frozen=True)
class Report:
    """Every guard, then every sentinel, with its state, in the catalogues' order; prints as a table."""

    guards: list[State]
    sentinels: list[State]

    def __str__(self) -> str:
        rows = ((each.name, _counted(each), each.reason) for each in (*self.guards, *self.sentinels))
        return "\n".join(aligned(rows))


def report() -> Report:
    """Return every guard and sentinel with its state and reason.

    Asks each guard whether the fault is there, which uses the device. Switches the layer on where nothing has yet, as
    any program that imports torch does.
    """
    import torch  # noqa: F401  PyTorch's autoload switches the layer on

    guards, sentinels = registry().each("guard"), registry().each("sentinel")
    return Report([_guard(each) for each in guards], [_sentinel(each) for each in sentinels])


def acted() -> list[dict[str, object]]:
    """What the guards did in this process, as results.json has it: name, times, the lines that were said, the issue."""
    return [{**_noted(guard), "issue": guard.issue} for guard in _that_acted("guard")]


def found() -> list[dict[str, object]]:
    """What the sentinels found in this process, as results.json has it: name, times, the lines that were said."""
    return [_noted(sentinel) for sentinel in _that_acted("sentinel")]


def suspended(*names: str, kind: str = "guard") -> AbstractContextManager[None]:
    """Switch single guards or sentinels off for a while, or all of a kind where no name is given.

    Raises UserError for a name that there is not.
    """
    return registry().suspended(*names, kind=kind)


def _that_acted(kind: str) -> list[Any]:
    return [each for each in registry().made(kind) if each.times]


def _noted(each: Guard | Sentinel) -> dict[str, object]:
    return {"name": each.name, "times": each.times, "lines": list(each.lines)}


def _guard(guard: Guard) -> State:
    """Ask whether the fault is there, which uses the device."""

    def state(word: str, reason: str) -> State:
        return State(guard.name, word, reason, guard.times, guard.what, guard.issue, guard.until)

    if standing := guard.standing(registry().arms(guard.name), "acted", 0):
        return state(*standing)
    if waiting := GUARDS.waits(guard.name):
        return state("waits", waiting)

    if not metal().value:
        return state("needless", metal().reason)
    verdict = guard.safely(guard.verdict)
    if verdict is None:
        return state("failed", guard.failure or "")
    return state("on" if verdict.value else "needless", verdict.reason)


def _sentinel(sentinel: Sentinel) -> State:
    """Asks nothing of the device."""
    word, reason = sentinel.standing(registry().arms(sentinel.name), "found", -1) or ("on", sentinel.why)
    return State(sentinel.name, word, reason, sentinel.times, sentinel.what)


def _counted(state: State) -> str:
    return f"{state.state}, {state.acted}x" if state.state in ("acted", "found") else state.state
