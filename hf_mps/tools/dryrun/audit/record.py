"""Records every operator that a training step calls on the device, and what Metal makes of each: the audit."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_mps.core.choice import Choice
from hf_mps.core.text import aligned, counted
from hf_mps.finetune.smoke.fake import DEVICE
from hf_mps.finetune.smoke.repeats import Known, answered
from hf_mps.metal.fallback.accounting import TRACKER
from hf_mps.metal.operators.calls import call_of, tensors_of
from hf_mps.metal.operators.launch_class import CLASSES, Call, LaunchClass, LaunchTable
from hf_mps.metal.operators.table import FINDINGS, KINDS, NO_OPERATORS, SEEN_AS, Kind, OperatorSupport
from hf_mps.tools.dryrun import layers
from hf_mps.tools.dryrun.launches import Launches, launch_lines, of_calls
from hf_mps.tools.dryrun.modules import ModuleTracker, family
from hf_mps.tools.dryrun.render import Annotation, Report

# Where a finding is tracked, or what mends it.
LINKS = {"fallback": TRACKER, "refused": "Metal has no float64; next: convert it before it reaches the device"}
PLACES_SHOWN = 3
LACKING = (torch.float64, torch.complex128)
"""The dtypes that no Metal kernel takes."""


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it around a step; `calls` has all calls in their order; of a few layers, `more` has those of one layer
    more, with the number of such layers.

    `places` has the calls of an operator ("aten::add.Tensor") for each (phase, module), `dtypes` those of its tensors.

    It does not see what a composite kernel calls inside, in C++; of a structured operator's forms the table knows that
    (`OperatorSupport.kernel_owner`).
    """

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self.dtypes: dict[str, set[torch.dtype]] = defaultdict(set)
        self.calls: list[Call] = []
        self.more: list[tuple[list[Call], int]] = []
        self._tracker = tracker

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch asks a fake tensor for its device twice an operator, through every mode: the slow way is skipped.
        if func is DEVICE and isinstance(args[0], FakeTensor):
            return args[0].device
        result, known = answered(func, args, kwargs or {})
        self.saw(func, args, kwargs or {}, result, known)
        return result

    def saw(self, func: Any, args: Any, kwargs: Any, result: Any, known: Known | None) -> None:
        """Count a call and its result; `known` is what `repeats.answered` knows of it."""
        noted = known.noted if known is not None else None
        if noted is None:
            name = SEEN_AS.get(func.name(), func.name())
            # What a call without arguments made, or moved here, counts as the device's too.
            dtypes = {tensor.dtype for tensor in tensors_of(args, kwargs, result) if tensor.device.type == "mps"}
            counts = dtypes and not name.startswith(NO_OPERATORS)
            noted = dtypes, [call_of(name, (args, kwargs), result)] if counts else []
            if known is not None:
                known.noted = noted
        for call in noted[1]:
            self.dtypes[call.operator] |= noted[0]
        self.again(noted[1])

    def again(self, calls: Sequence[Call]) -> None:
        """Count `calls` as made here; of what dtypes they are is known."""
        for call in calls:
            phase, module = self._tracker.here()
            self.places[call.operator][phase, family(module)] += 1
        self.calls += calls

    def mark(self) -> Any:
        """Return what was counted so far, for `repeat`."""
        return len(self.calls), {name: Counter(places) for name, places in self.places.items()}

    def repeat(self, mark: Any, count: int) -> None:
        """Count the calls since `mark` so often more, each where it was made."""
        begin, before = mark
        self.calls += self.calls[begin:] * count
        for name, places in self.places.items():
            places.update({place: count * (n - before.get(name, {}).get(place, 0)) for place, n in places.items()})

    def forget(self) -> None:
        """Begin again: what was seen was of another step."""
        for seen in (self.places, self.dtypes, self.calls):
            seen.clear()

    def of_all(self, more: Sequence[tuple[OperatorRecorder, int]]) -> OperatorRecorder:
        """Return what a step of the whole model calls, if this is of a few of its layers.

        `more` are of one layer more each, with the number of such layers that this one lacks (`layers.Cut`).
        """
        whole = OperatorRecorder(self._tracker)
        whole.calls, whole.more = self.calls, [(each.calls, lacking) for each, lacking in more]
        every = (self, *(each for each, _ in more))
        for name in {name: None for each in every for name in each.places}:
            places = [(each.places.get(name, Counter()), lacking) for each, lacking in more]
            whole.places[name] = layers.of_all(self.places.get(name, Counter()), places)
            whole.dtypes[name] = set().union(*(each.dtypes.get(name, ()) for each in every))
        return whole


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
        """Return where its absence is tracked, or what mends it; None for what runs on Metal."""
        return LINKS.get(self.kind)

    @property
    def launched(self) -> str:
        """Its classes in words, the most calls first: `graph`, or `blit 10, metal 2`."""
        totals: Counter[str] = Counter()
        for kind, calls, _ in self.launches:
            totals[kind] += calls
        return ", ".join(f"{kind} {calls}" if len(totals) > 1 else kind for kind, calls in totals.most_common())

    @property
    def where(self) -> str:
        """Return the places in words: `forward: bert.encoder.layer.*.output`."""
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
        """Return the entries of some kinds."""
        return [entry for entry in self.entries if entry.kind in kinds]

    @property
    def findings(self) -> list[Entry]:
        """Return what falls back or is refused."""
        return self.of(*FINDINGS)


def audit_of(
    target: str,
    recorder: OperatorRecorder,
    support: OperatorSupport,
    facts: Mapping[str, Choice[Any]],
    table: LaunchTable | Choice[None] | None = None,
) -> Audit:
    """Return the audit of what was recorded, what Metal lacks first; `table` says what the calls launch."""
    launches = of_calls(recorder.calls, table, recorder.more) if isinstance(table, LaunchTable) else table
    places: dict[str, Counter[tuple[str, str]]] = {}
    dtypes: dict[str, set[torch.dtype]] = {}
    classes: dict[str, Counter[Choice[LaunchClass]]] = {}
    for called, of_places in recorder.places.items():
        owner = support.kernel_owner(called)
        # The out= form is named as its operator where that is the one that Metal lacks.
        name = owner if support.kind(owner) == "fallback" else called
        places.setdefault(name, Counter()).update(of_places)
        dtypes.setdefault(name, set()).update(recorder.dtypes[called])
        if isinstance(launches, Launches):
            classes.setdefault(name, Counter()).update(launches.operators.get(called, {}))
    entries = []
    for name, calls in places.items():
        kind = support.kind(name, [str(dtype) for dtype in dtypes[name] if dtype in LACKING])
        names = tuple(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes[name]))
        told = tuple((found.value, n, found.reason) for found, n in classes.get(name, Counter()).most_common())
        entries.append(Entry(name, kind, calls.total(), names, tuple((*at, n) for at, n in calls.most_common()), told))
    # What Metal lacks comes first, whatever its share of the calls.
    entries.sort(key=lambda entry: (entry.kind not in FINDINGS, -entry.calls, entry.operator))
    return Audit(target, tuple(entries), facts, launches)


def report(audit: Audit, *, every: bool = False) -> Report:
    """Return the number of operators of each kind and what was found; with `every` the table has each operator."""
    counts, launches = Counter(entry.kind for entry in audit.entries), audit.launches
    refused, fallbacks = counts["refused"], counts["fallback"]
    notes = [] if audit.findings else [Annotation("notice", f"all {len(audit.entries)} operators run on Metal")]
    for entry in audit.findings:
        what = KINDS[entry.kind].partition(":")[0]
        text = f"{entry.operator}: {what}; {entry.calls} calls ({entry.where}); {entry.link}"
        notes.append(Annotation("error" if entry.kind == "refused" else "warning", text))
    if isinstance(launches, Launches):
        notes.append(Annotation("notice", f"launches: {launches.choice}"))
    names = ", ".join(entry.operator for entry in audit.findings)
    problem = f"{len(audit.findings)} of {len(audit.entries)} operators do not run on Metal: {names}"
    badge = (counted(fallbacks, "fallback"), "yellow") if fallbacks else ("runs on Metal", "brightgreen")
    return Report(
        "audit",
        audit.target,
        audit.facts,
        list(_lines(audit, counts, every)),
        {
            "counts": {kind: counts[kind] for kind in KINDS},
            "launches": launches.values() if isinstance(launches, Launches) else launches,
            "operators": [
                vars(entry)
                | {
                    "places": [dict(zip(("phase", "module", "calls"), place, strict=True)) for place in entry.places],
                    "launches": [dict(zip(("class", "calls", "reason"), of, strict=True)) for of in entry.launches],
                    "link": entry.link,
                }
                for entry in audit.entries
            ],
        },
        names=(*KINDS, *CLASSES),
        annotations=notes,
        badge=(f"{refused} refused", "red") if refused else badge,
        problem=problem if audit.findings else "",
    )


def _lines(audit: Audit, counts: Counter[Kind], every: bool) -> Iterator[str | tuple[str, ...]]:
    yield from ("", f"one training step: {len(audit.entries)} operators, {sum(e.calls for e in audit.entries):,} calls")
    yield from ((k, f"{counts[k]:>4}", what) for k, what in KINDS.items() if counts[k] or k in FINDINGS)
    if shown := audit.entries if every else audit.of(*FINDINGS, "unknown"):
        rows = [(e.operator, e.kind, e.launched, f"{e.calls:,}", ", ".join(e.dtypes), e.where) for e in shown]
        yield from ("", *aligned([("operator", "kind", "launches", "calls", "dtypes", "where"), *rows], widest=1000))
    if audit.launches is not None:
        yield from launch_lines(audit.launches)
    yield from dict.fromkeys(f"next: {entry.link}" for entry in audit.findings)
