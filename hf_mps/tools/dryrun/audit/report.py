"""An audit's report: the operators of each kind, those that do not run on Metal, and where the step calls them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from hf_mps.core.text import aligned, counted
from hf_mps.metal.operators.launch_class import CLASSES
from hf_mps.metal.operators.table import FINDINGS, KINDS, Kind
from hf_mps.tools.dryrun.audit.record import Audit, Entry
from hf_mps.tools.dryrun.launches import Launches, launch_lines
from hf_mps.tools.dryrun.render import Annotation, Report


def report(audit: Audit, *, every: bool = False) -> Report:
    """The number of operators of each kind and what was found; with `every`, each operator stands in the table."""
    counts = Counter(entry.kind for entry in audit.entries)
    return Report(
        "audit",
        audit.target,
        audit.facts,
        list(_lines(audit, counts, every)),
        {
            "counts": {kind: counts[kind] for kind in KINDS},
            "launches": audit.launches.values() if isinstance(audit.launches, Launches) else audit.launches,
            "operators": [_values(entry) for entry in audit.entries],
        },
        names=(*KINDS, *CLASSES),
        annotations=list(_annotations(audit)),
        badge=_badge(counts["refused"], counts["fallback"]),
        problem=_problem(audit),
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


def _values(entry: Entry) -> dict[str, Any]:
    return {
        "operator": entry.operator,
        "kind": entry.kind,
        "calls": entry.calls,
        "dtypes": entry.dtypes,
        "places": [{"phase": phase, "module": module, "calls": calls} for phase, module, calls in entry.places],
        "link": entry.link,
        "launches": [{"class": kind, "calls": calls, "reason": reason} for kind, calls, reason in entry.launches],
    }


def _annotations(audit: Audit) -> Iterator[Annotation]:
    if not audit.findings:
        yield Annotation("notice", f"all {len(audit.entries)} operators run on Metal")
    yield from map(_annotation, audit.findings)
    if isinstance(audit.launches, Launches):
        yield Annotation("notice", f"launches: {audit.launches.choice}")


def _annotation(entry: Entry) -> Annotation:
    what = KINDS[entry.kind].partition(":")[0]
    text = f"{entry.operator}: {what}; {entry.calls} calls ({entry.where}); {entry.link}"
    return Annotation("error" if entry.kind == "refused" else "warning", text)


def _badge(refused: int, fallbacks: int) -> tuple[str, str]:
    if refused:
        return f"{refused} refused", "red"
    if fallbacks:
        return counted(fallbacks, "fallback"), "yellow"
    return "runs on Metal", "brightgreen"


def _problem(audit: Audit) -> str:
    if not audit.findings:
        return ""
    names = ", ".join(entry.operator for entry in audit.findings)
    return f"{len(audit.findings)} of {len(audit.entries)} operators do not run on Metal: {names}"
