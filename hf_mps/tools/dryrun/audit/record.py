"""Records every operator that a training step calls on the device, and what Metal makes of each: the audit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_mps.core.choice import Choice
from hf_mps.metal.fallback.accounting import TRACKER
from hf_mps.metal.operators.calls import call_of
from hf_mps.metal.operators.launch_class import Call, LaunchClass, LaunchTable
from hf_mps.metal.operators.table import FINDINGS, NO_OPERATORS, SEEN_AS, Kind, OperatorSupport
from hf_mps.tools.dryrun.launches import Launches, of_calls
from hf_mps.tools.dryrun.modules import ModuleTracker, family

# Where a finding is tracked, or what mends it.
LINKS = {"fallback": TRACKER, "refused": "Metal has no float64; next: convert it before it reaches the device"}
PLACES_SHOWN = 3
LACKING = (torch.float64, torch.complex128)
"""The dtypes that no Metal kernel takes."""


@dataclass
class OperatorCalls:
    """The calls of one operator ("aten::add.Tensor") for each (phase, module), and their dtypes on the device."""

    name: str
    places: dict[tuple[str, str], int] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around a step; `seen` maps each operator's name to its calls, `calls` has all in their order.

    It does not see what a composite kernel calls inside, in C++; of a structured operator's forms the table knows that
    (`OperatorSupport.kernel_owner`).
    """

    def __init__(self, tracker: ModuleTracker, device: str = "mps") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[str, OperatorCalls] = {}
        self.calls: list[Call] = []
        self._tracker, self._device = tracker, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = SEEN_AS.get(func.name(), func.name())
        if name.startswith(NO_OPERATORS):
            return result
        # What a call without arguments made, or moved here, counts as the device's too.
        if dtypes := [tensor.dtype for tensor in self._on_device((args, kwargs, result))]:
            self._note(name, dtypes)
            self.calls.append(call_of(name, (args, kwargs), result))
        return result

    def forget(self) -> None:
        """Begin again: what was seen was of another step."""
        self.seen.clear()
        self.calls.clear()

    def _on_device(self, tree: Any) -> Iterator[torch.Tensor]:
        for leaf in tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device:
                yield leaf

    def _note(self, name: str, dtypes: list[torch.dtype]) -> None:
        seen = self.seen.setdefault(name, OperatorCalls(name))
        phase, module = self._tracker.here()
        place = (phase, family(module))
        seen.places[place] = seen.places.get(place, 0) + 1
        seen.dtypes.update(dtypes)


@dataclass(frozen=True)
class Entry:
    """One operator: `places` are (phase, module, calls), `launches` (class, calls, reason), the most calls first."""

    operator: str
    kind: Kind
    calls: int
    dtypes: tuple[str, ...]
    places: tuple[tuple[str, str, int], ...]
    launches: tuple[tuple[LaunchClass, int, str], ...] = ()

    @property
    def link(self) -> str | None:
        """Where its absence is tracked, or what mends it; None for what runs on Metal."""
        return LINKS.get(self.kind)

    @property
    def launched(self) -> str:
        """Its classes in words, the most calls first: `graph`, or `blit 10, metal 2`."""
        if len(self.launches) == 1:
            return self.launches[0][0]
        totals: Counter[str] = Counter()
        for kind, calls, _ in self.launches:
            totals[kind] += calls
        return ", ".join(f"{kind} {calls}" if len(totals) > 1 else kind for kind, calls in totals.most_common())

    @property
    def where(self) -> str:
        """The places in words: `forward: bert.encoder.layer.*.output`."""
        shown = [f"{phase}: {module}" if module else phase for phase, module, _ in self.places[:PLACES_SHOWN]]
        more = len(self.places) - len(shown)
        return "; ".join(shown) + (f"; {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Audit:
    """Every operator of a training step of `target`. `facts` say how it was looked at, each with its reason.

    `launches` is what they launch on a release, or why that is not known; None where nobody asked.
    """

    target: str
    entries: tuple[Entry, ...]
    facts: Mapping[str, Choice[Any]]
    launches: Launches | Choice[None] | None = None

    def of(self, *kinds: Kind) -> list[Entry]:
        """The entries of some kinds."""
        return [entry for entry in self.entries if entry.kind in kinds]

    @property
    def findings(self) -> list[Entry]:
        """What falls back or is refused."""
        return self.of(*FINDINGS)


def audit_of(
    target: str,
    recorder: OperatorRecorder,
    support: OperatorSupport,
    facts: Mapping[str, Choice[Any]],
    table: LaunchTable | Choice[None] | None = None,
) -> Audit:
    """The audit of what was recorded, what Metal lacks first; `table` says what the calls launch."""
    launches = of_calls(recorder.calls, table) if isinstance(table, LaunchTable) else table
    places: dict[str, Counter[tuple[str, str]]] = {}
    dtypes: dict[str, set[torch.dtype]] = {}
    classes: dict[str, Counter[Choice[LaunchClass]]] = {}
    for seen in recorder.seen.values():
        owner = support.kernel_owner(seen.name)
        # The out= form stands for its operator where it is the one that Metal lacks.
        name = owner if support.kind(owner) == "fallback" else seen.name
        places.setdefault(name, Counter()).update(seen.places)
        dtypes.setdefault(name, set()).update(seen.dtypes)
        if isinstance(launches, Launches):
            classes.setdefault(name, Counter()).update(launches.operators.get(seen.name, {}))
    entries = []
    for name, calls in places.items():
        kind = support.kind(name, [str(dtype) for dtype in dtypes[name] if dtype in LACKING])
        names = tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes[name]))
        told = tuple((found.value, n, found.reason) for found, n in classes.get(name, Counter()).most_common())
        entries.append(Entry(name, kind, calls.total(), names, tuple((*at, n) for at, n in calls.most_common()), told))
    entries.sort(key=lambda entry: (entry.kind not in FINDINGS, -entry.calls, entry.operator))
    return Audit(target, tuple(entries), facts, launches)
