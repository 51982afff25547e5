"""What the calls of a step launch on a Mac: totals for each launch class, graphs to compile, and the dispatch floor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.errors import UserError
from hf_mps.core.text import counted
from hf_mps.metal.device import machine
from hf_mps.metal.operators.launch_class import CLASSES, LAUNCHED, Call, LaunchClass, LaunchTable, encoders, of_release
from hf_mps.tools.dryrun.layers import calls_of_all

# Averages over 1,000 calls on one element: exp, tanh and erfinv took 1.2 to 1.4 us of dispatch, sqrt, log, sin and cos,
# which were MPSGraph then, 19.2 to 20.7 us.
KERNEL_SECONDS, GRAPH_SECONDS = 1.3e-6, 20e-6
SOURCE = "https://github.com/pytorch/pytorch/issues/148219"
MEASURED = "1.3 us a Metal kernel and 20 us an MPSGraph as measured on an M1 Pro, pytorch#148219"


@dataclass(frozen=True)
class Launches:
    """What the calls of a step launch on `release`.

    `classes` counts what the host encodes (of "view" and "cpu" calls), `graphs` the distinct graphs that have to be
    compiled, `encoders` the command encoders, and `operators` says for each operator how many of its calls are of which
    class, and why.
    """

    release: str
    classes: Mapping[LaunchClass, int]
    graphs: int
    encoders: int
    operators: Mapping[str, Mapping[Choice[LaunchClass], int]]

    @property
    def total(self) -> int:
        """Dispatches of kernels and runs of graphs."""
        return sum(self.classes.get(each, 0) for each in LAUNCHED)

    @property
    def blits(self) -> int:
        """Copies by the blit encoder."""
        return self.classes.get("blit", 0)

    @property
    def floor(self) -> float:
        """Seconds that the host needs at least to hand the launches over, by the published figures.

        What is neither kernel nor graph has none; it counts as a kernel.
        """
        graphs = self.classes.get("graph", 0)
        return graphs * GRAPH_SECONDS + (self.total + self.blits - graphs) * KERNEL_SECONDS

    @property
    def choice(self) -> Choice[str]:
        """Return the most of it in a line, and what it is known from."""
        found = sorted((each for each in LAUNCHED if self.classes.get(each)), key=lambda each: -self.classes[each])
        parts = ", ".join(f"{self.classes[each]:,} {each}" for each in found)
        graphs, floor = counted(self.graphs, "graph"), _time(self.floor)
        said = f"{self.total:,} a step: {parts}; {self.beside}; {graphs} to compile; at least {floor} of dispatch"
        return Choice(said, f"as torch {self.release} launches them; {MEASURED}")

    @property
    def beside(self) -> str:
        """Return what is encoded besides kernels and graphs, in words."""
        return f"{self.blits:,} blits, {self.encoders:,} encoders"

    def values(self) -> dict[str, Any]:
        """Return the JSON object's part; `dispatch_floor` in seconds."""
        return {
            **{"release": self.release, "launches": self.total, "blits": self.blits, "encoders": self.encoders},
            "classes": {each: self.classes.get(each, 0) for each in CLASSES},
            **{"graph_shapes": self.graphs, "dispatch_floor": round(self.floor, 9), "source": SOURCE},
        }


def of_calls(calls: Sequence[Call], table: LaunchTable, more: Sequence[tuple[Sequence[Call], int]] = ()) -> Launches:
    """Return the launches of some calls, in the order in which they are made, by a release's table.

    Of a few layers' calls `more` are those of one layer more each, with the number of such layers (`layers.Cut`): the
    launches are then the whole model's.
    """
    classes: Counter[LaunchClass] = Counter()
    operators: dict[str, Counter[Choice[LaunchClass]]] = {}
    graphs: dict[object, int] = {}
    for call, count in calls_of_all(calls, more).items():
        found, parts = table.of(call), table.encoded(call)
        nothing: tuple[LaunchClass, ...] = (found.value,) if found.value in ("view", "cpu") else ()
        for kind, of_kind in Counter(parts or nothing).items():
            classes[kind] += count * of_kind
        operators.setdefault(call.operator, Counter())[found] += count
        graphs[call.graph] = parts.count("graph")
    several = _encoders(calls, table)
    several += sum(lacking * (_encoders(each, table) - several) for each, lacking in more)
    return Launches(table.release, classes, sum(graphs.values()), several, operators)


def _encoders(calls: Sequence[Call], table: LaunchTable) -> int:
    parts = {number: table.encoded(call) for number, call in {id(call): call for call in calls}.items()}
    return encoders(parts[id(call)] for call in calls)  # by the object, as calls are slow to hash


def table_of(release: str | None) -> LaunchTable | Choice[None]:
    """Return the launch table of `release`, by default the installed torch's; where that one has none, why.

    Raises UserError for a release that was asked for and is not known.
    """
    macos = machine.present().macos
    system = (int(macos.split(".")[0]), 0) if macos and macos.split(".")[0].isdigit() else (15, 0)
    try:
        return of_release(release or str(torch.__version__), macos=system)
    except UserError as error:
        if release is not None:
            raise
        return Choice(None, str(error))


def asked_for(release: str | None, table: LaunchTable | Choice[None] | None) -> dict[str, Choice[str]]:
    """Return the fact to tell where another release than the installed one was asked for."""
    if release is None or not isinstance(table, LaunchTable):
        return {}
    reason = f"by its wheel; the operators are those that torch {torch.__version__} calls"
    return {"torch": Choice(table.release, reason)}


def launch_lines(launches: Launches | Choice[None]) -> Iterator[str | tuple[str, ...]]:
    """The lines of a report's table: what is launched, or why nobody knows."""
    if isinstance(launches, Choice):
        yield from ("", f"what this step launches is not known: {launches.reason}")
        return
    yield from ("", f"{launches.total:,} launches a step on torch {launches.release}; {launches.beside}")
    for each, what in CLASSES.items():
        if count := launches.classes.get(each):
            shapes = f": {launches.graphs:,} for this batch" if each == "graph" else ""
            yield (each, f"{count:>5,}", f"{what}{shapes}")
    yield f"at least {_time(launches.floor)} to hand them to the GPU: {MEASURED}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.0f} us"
