"""What fell back (calls, seconds, bytes and way of each operator), and what the user reads of it.

Figures are added without a lock, under Python's own: enough for the calls of a training thread and of autograd's.
Seconds hold the waiting for the device, which every fallback needs.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from hf_mps.core.notices import once, user_line
from hf_mps.core.text import counted

TRACKER = "https://github.com/pytorch/pytorch/issues/141287"

_silent = False


class MetalFallbackWarning(UserWarning):
    """An operator without a Metal kernel ran on the CPU."""


def silence(silent: bool) -> None:
    """Say nothing from now on (mode quiet), or speak."""
    global _silent
    _silent = silent


def warn_operator(name: str, values: tuple[Any, ...]) -> None:
    """Warn that an operator runs on the CPU, once for each operator: its name, its tensors, and who asked for it."""
    tracked = f". Missing operators are tracked in {TRACKER}" if name.startswith("aten::") else ""
    _warn(
        name,
        f"{name}{_shapes(values)} has no Metal kernel and runs on the CPU, as often as it is called; "
        f"each call waits for the GPU{tracked}",
    )


def warn_refused(name: str, values: tuple[Any, ...], reason: str) -> None:
    """Warn that an operator's Metal kernel refused a call, which the CPU took; once for each operator."""
    _warn(
        f"{name} refused",
        f"{name}{_shapes(values)} was refused on Metal ({reason}) and runs on the CPU; "
        "each such call waits for the GPU",
    )


def warn_float32(name: str) -> None:
    """Warn, once, that a float64 result became float32."""
    _warn("float64", f"{name} gave float64 on the CPU, which Metal does not have: the result is float32")


def simulated_label() -> str:
    """Return ", simulated" where the Metal device is, for a line of figures, else nothing."""
    from hf_mps.metal.device import simulated

    return ", simulated" if simulated() else ""


def _warn(key: str, text: str) -> None:
    if _silent or not once(key):
        return
    # Raised here, before the operator runs, where the program turns warnings into errors.
    warnings.warn_explicit(f"hf_mps: {text}", MetalFallbackWarning, *(user_line() or ("<unknown>", 1)))


def _shapes(values: tuple[Any, ...]) -> str:
    """Return dtypes and shapes of the tensors in words: " of float32[4, 10], int64[4]"."""
    from hf_mps.metal.operators.calls import tensors_of  # here, as this file imports no torch

    shown = tensors_of(values)
    words = ", ".join(f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}" for value in shown[:4])
    return "" if not words else f" of {words}{', …' if len(shown) > 4 else ''}"


WINDOW = 5.0  # seconds over which the share is judged


@dataclass(slots=True)
class OpStats:
    """The running figures of one operator."""

    name: str
    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0
    shared: int = 0

    def book(self, start: float, copied: int, *, shared: bool = False) -> None:
        """Add a call that began at `start` (perf_counter), copied so many bytes, and may have shared memory."""
        now = perf_counter()
        self.calls += 1
        self.seconds += now - start
        self.bytes += copied
        if shared:
            self.shared += 1
        if now > monitor.due:
            monitor.judge(now)


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
        """Return the report for a results file, in JSON's types."""
        return {
            "seconds": round(self.seconds, 6),
            "share": round(self.share, 6),
            "operators": [
                {
                    **{name: getattr(entry, name) for name in ("operator", "calls", "bytes", "way")},
                    **{name: round(getattr(entry, name), 6) for name in ("seconds", "share")},
                }
                for entry in self.operators
            ],
        }

    def __str__(self) -> str:
        if not self.operators:
            return ""
        lines = [
            f"hf-mps: {counted(len(self.operators), 'operator')} without a Metal kernel ran on the CPU: "
            f"{self.seconds:.2f} s of {self.wall:.1f} s ({self.share:.1%}{simulated_label()})"
        ]
        width = max(8, *(len(entry.operator) for entry in self.operators))
        lines.append(f"  {'operator':<{width}}  {'calls':>8}  {'seconds':>8}  {'share':>6}  {'copied':>9}  way")
        for entry in self.operators:
            figures = f"{entry.calls:>8}  {entry.seconds:>8.3f}  {entry.share:>6.1%}  {_size(entry.bytes):>9}"
            lines.append(f"  {entry.operator:<{width}}  {figures}  {entry.way}")
        lines.append("  not in these seconds: at each call the GPU runs out of work, as nothing is queued meanwhile")
        return "\n".join(lines)


Snapshot = tuple[float, dict[str, tuple[int, float, int, int]]]


class Ledger:
    """The figures of a process, by operator name ("aten::mode")."""

    def __init__(self) -> None:
        self._stats: dict[str, OpStats] = {}
        self._start = perf_counter()
        self._reported = 0

    def stats(self, name: str) -> OpStats:
        """Return the operator's figures, made on first use."""
        return self._stats.setdefault(name, OpStats(name))

    def reset(self) -> None:
        """Forget all figures; the time that passed counts from now."""
        self._start = perf_counter()
        self._reported = 0
        for stats in self._stats.values():
            stats.calls = stats.bytes = stats.shared = 0
            stats.seconds = 0.0

    def snapshot(self) -> Snapshot:
        """Return the figures up to now, for `report(since=…)`."""
        used = [stats for stats in self._stats.values() if stats.calls]
        return perf_counter(), {stats.name: (stats.calls, stats.seconds, stats.bytes, stats.shared) for stats in used}

    def report(self, since: Snapshot | None = None) -> Report:
        """Return what fell back since a snapshot, or since the layer was switched on (or `reset`)."""
        end, figures = self.snapshot()
        start, before = since if since is not None else (self._start, {})
        wall = end - start
        entries = []
        for name, now in figures.items():
            past = before.get(name, (0, 0.0, 0, 0))
            if now[0] > past[0]:
                spent = now[1] - past[1]
                calls, copied, shared = now[0] - past[0], now[2] - past[2], now[3] - past[3]
                entries.append(Entry(name, calls, spent, copied, shared, spent / wall if wall > 0 else 0.0))
        return Report(tuple(sorted(entries, key=lambda entry: -entry.seconds)), wall)

    def seconds(self) -> float:
        """Return seconds of all operators up to now."""
        return sum(stats.seconds for stats in self._stats.values())

    def _calls(self) -> int:
        return sum(stats.calls for stats in self._stats.values())

    def print_report(self, since: Snapshot | None = None) -> None:
        """Print the table on stderr, where something fell back since the last table and the mode is not quiet."""
        text = str(self.report(since)) if self._calls() > self._reported else ""
        if text:
            self.mark_reported()
            if not _silent:
                print(text, file=sys.stderr, flush=True)

    def mark_reported(self) -> None:
        """Let what fell back up to now count as printed: the caller has reported it."""
        self._reported = self._calls()


class OverheadMonitor:
    """Warns once when fallbacks take more than `limit` of the time, judged over windows of a few seconds."""

    def __init__(self) -> None:
        self.limit = 0.1
        self.due = 0.0
        self._since = perf_counter()
        self._seconds = 0.0

    def restart(self, now: float) -> None:
        """Let a window begin."""
        self._since, self._seconds, self.due = now, ledger.seconds(), now + WINDOW

    def judge(self, now: float) -> None:
        """Judge the window that ends now, and begin the next."""
        spent, wall = ledger.seconds() - self._seconds, now - self._since
        self.restart(now)
        self.check(spent, wall)

    def check(self, spent: float, wall: float) -> None:
        """Warn where `spent` of `wall` seconds is above the limit; once in a process."""
        if wall > 0 and spent / wall > self.limit:
            took = f"{spent / wall:.0%} of the last {wall:.1f} s{simulated_label()}, more than {self.limit:.0%}"
            names = "(HF_MPS_FALLBACK_SHARE); hf_mps.fallback.report() names them"
            _warn("share", f"operators without a Metal kernel took {took} {names}")


def _size(count: int) -> str:
    """Return bytes in words, in powers of 1000: "12.3 MB"."""
    power = min(3, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.1f} {'KMG'[power - 1]}B" if power else f"{count} B"


ledger = Ledger()
monitor = OverheadMonitor()
