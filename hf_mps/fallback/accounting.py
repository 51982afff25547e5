"""What fell back: calls, seconds, bytes and way of each operator, and their share of the time that passed.

Figures are added without a lock, under Python's own: enough for the calls of a training thread and of autograd's.
Seconds hold the waiting for the device, which every fallback needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from hf_mps.fallback import warnings

WINDOW = 5.0  # seconds over which the share is judged


class Slot:
    """The running figures of one operator."""

    __slots__ = ("bytes", "calls", "name", "seconds", "shared")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.seconds = 0.0
        self.bytes = 0
        self.shared = 0

    def book(self, start: float, moved: int, *, shared: bool = False) -> None:
        """Add a call that began at `start` (perf_counter), copied `moved` bytes, and may have shared memory."""
        now = perf_counter()
        self.calls += 1
        self.seconds += now - start
        self.bytes += moved
        if shared:
            self.shared += 1
        if now > share.due:
            share.judge(now)

    def first(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Tell the user, once for each operator, before its first call."""
        warnings.operator(self.name, (*args, *kwargs.values()))

    def became_single(self) -> None:
        """Tell the user, once, that a float64 result became float32."""
        warnings.single(self.name)


@dataclass(frozen=True)
class Entry:
    """One operator's part of a report: `seconds` hold the waiting for the device, `bytes` were copied."""

    operator: str
    calls: int
    seconds: float
    bytes: int
    shared: int  # calls that copied no large tensor
    share: float  # of the time that passed, 0 to 1

    @property
    def way(self) -> str:
        """ "shared", "copied", or the number of calls of each."""
        if self.shared in (0, self.calls):
            return "shared" if self.shared else "copied"
        return f"shared {self.shared}, copied {self.calls - self.shared}"


@dataclass(frozen=True)
class Report:
    """What fell back in `wall` seconds, the slowest operator first; str() is a table, empty where nothing did."""

    operators: tuple[Entry, ...]
    wall: float

    @property
    def seconds(self) -> float:
        """Seconds of all operators together."""
        return sum(entry.seconds for entry in self.operators)

    @property
    def calls(self) -> int:
        """Calls of all operators together."""
        return sum(entry.calls for entry in self.operators)

    @property
    def share(self) -> float:
        """Their share of the time that passed, 0 to 1."""
        return self.seconds / self.wall if self.wall > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The report for a results file, in JSON's types."""
        return {
            "seconds": round(self.seconds, 6),
            "share": round(self.share, 6),
            "operators": [
                {
                    "operator": entry.operator,
                    "calls": entry.calls,
                    "seconds": round(entry.seconds, 6),
                    "bytes": entry.bytes,
                    "share": round(entry.share, 6),
                    "way": entry.way,
                }
                for entry in self.operators
            ],
        }

    def __str__(self) -> str:
        return warnings.table(self) if self.operators else ""


Snapshot = tuple[float, dict[str, tuple[int, float, int, int]]]


class Ledger:
    """The slots of a process, by operator name ("aten::mode")."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._start = perf_counter()
        self._printed = 0

    def slot(self, name: str) -> Slot:
        """The operator's slot, made on first use."""
        return self._slots.setdefault(name, Slot(name))

    def reset(self) -> None:
        """Forget all figures; the time that passed counts from now."""
        self._start = perf_counter()
        self._printed = 0
        for slot in self._slots.values():
            slot.calls = slot.bytes = slot.shared = 0
            slot.seconds = 0.0

    def now(self) -> Snapshot:
        """The figures up to now, for `report(since=…)`."""
        used = [slot for slot in self._slots.values() if slot.calls]
        return perf_counter(), {slot.name: (slot.calls, slot.seconds, slot.bytes, slot.shared) for slot in used}

    def report(self, since: Snapshot | None = None) -> Report:
        """What fell back since a snapshot, or since the layer was switched on (or `reset`)."""
        end, figures = self.now()
        start, before = since if since is not None else (self._start, {})
        wall = end - start
        entries = []
        for name, (calls, seconds, moved, shared) in figures.items():
            past = before.get(name, (0, 0.0, 0, 0))
            if calls > past[0]:
                spent = seconds - past[1]
                part = spent / wall if wall > 0 else 0.0
                entries.append(Entry(name, calls - past[0], spent, moved - past[2], shared - past[3], part))
        return Report(tuple(sorted(entries, key=lambda entry: -entry.seconds)), wall)

    def total(self) -> float:
        """Seconds of all operators up to now."""
        return sum(slot.seconds for slot in self._slots.values())

    def print_report(self, since: Snapshot | None = None) -> None:
        """Print the table on stderr, where something fell back since the last table and the mode is not quiet."""
        calls = sum(slot.calls for slot in self._slots.values())
        text = str(self.report(since)) if calls > self._printed else ""
        if text:
            self._printed = calls
            warnings.say(text)

    def told(self) -> None:
        """Let what fell back up to now count as printed: somebody has told of it in words of their own."""
        self._printed = sum(slot.calls for slot in self._slots.values())


class Share:
    """Warns once when fallbacks take more than `limit` of the time, judged over windows of a few seconds."""

    def __init__(self) -> None:
        self.limit = 0.1
        self.due = 0.0
        self._since = perf_counter()
        self._seconds = 0.0

    def restart(self, now: float) -> None:
        """Let a window begin."""
        self._since, self._seconds, self.due = now, ledger.total(), now + WINDOW

    def judge(self, now: float) -> None:
        """Judge the window that ends now, and begin the next."""
        spent, wall = ledger.total() - self._seconds, now - self._since
        self.restart(now)
        self.check(spent, wall)

    def check(self, spent: float, wall: float) -> None:
        """Warn where `spent` of `wall` seconds is above the limit; once in a process."""
        if wall > 0 and spent / wall > self.limit:
            warnings.share(spent / wall, wall, self.limit)


ledger = Ledger()
share = Share()
