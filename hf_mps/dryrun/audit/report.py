"""An audit's result, and its four forms: for people, as JSON, as GitHub annotations, as a badge."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.fallback.warnings import TRACKER
from hf_mps.operators.support import FOUND, KINDS, Kind

FLOAT64 = "Metal has no float64; next: convert it before it reaches the device"
PLACES_SHOWN = 3


@dataclass(frozen=True)
class Entry:
    """One operator: `places` are (phase, module, calls), the most calls first; `link` where its absence is tracked."""

    operator: str
    kind: Kind
    calls: int
    dtypes: tuple[str, ...]
    places: tuple[tuple[str, str, int], ...]
    link: str | None = None

    @property
    def where(self) -> str:
        """The places in words: `forward: bert.encoder.layer.*.output`."""
        shown = [f"{phase}: {module}" if module else phase for phase, module, _ in self.places[:PLACES_SHOWN]]
        more = len(self.places) - len(shown)
        return "; ".join(shown) + (f"; {more} more" if more > 0 else "")


@dataclass(frozen=True)
class Audit:
    """Every operator of a training step of `target`. `facts` say how it was looked at, each with its reason."""

    target: str
    entries: tuple[Entry, ...]
    facts: Mapping[str, Choice[Any]]

    def of(self, *kinds: Kind) -> list[Entry]:
        """The entries of some kinds."""
        return [entry for entry in self.entries if entry.kind in kinds]

    @property
    def found(self) -> list[Entry]:
        """What falls back or is refused."""
        return self.of(*FOUND)

    def as_dict(self) -> dict[str, Any]:
        """The audit in JSON's types."""
        from hf_mps.core.files import plain
        from hf_mps.device import simulated

        counts = Counter(entry.kind for entry in self.entries)
        entries = [
            {
                "operator": each.operator,
                "kind": each.kind,
                "calls": each.calls,
                "dtypes": list(each.dtypes),
                "places": [{"phase": phase, "module": module, "calls": calls} for phase, module, calls in each.places],
                "link": each.link,
            }
            for each in self.entries
        ]
        return {
            "target": self.target,
            "simulated": simulated(),
            "facts": plain(dict(self.facts)),
            "counts": {kind: counts.get(kind, 0) for kind in KINDS},
            "operators": entries,
        }


def for_people(audit: Audit, *, every: bool) -> str:
    """The facts, the number of operators of each kind, and what was found; with `every`, each operator."""
    width = max(len(name) for name in (*audit.facts, *KINDS))
    lines = [f"hf-mps audit {audit.target}"]
    lines += [f"  {name:<{width}}  {choice.value}  {choice.reason}" for name, choice in audit.facts.items()]
    calls = sum(entry.calls for entry in audit.entries)
    lines += ["", f"one training step: {len(audit.entries)} operators, {calls:,} calls"]
    for kind, what in KINDS.items():
        if (number := len(audit.of(kind))) or kind in FOUND:
            lines.append(f"  {kind:<{width}}  {number:>4}  {what}")
    shown = audit.entries if every else [entry for entry in audit.entries if entry.kind in (*FOUND, "unknown")]
    if shown:
        lines += ["", *_table(shown)]
    for link in dict.fromkeys(entry.link for entry in audit.found if entry.link):
        lines.append(f"next: {link}")
    return "\n".join(lines)


def for_programs(audit: Audit) -> str:
    """One JSON object."""
    return json.dumps(audit.as_dict(), indent=2)


def for_github(audit: Audit) -> str:
    """GitHub's workflow commands: an annotation for each finding, or one notice that there is none.

    Source: docs.github.com, "Workflow commands for GitHub Actions".
    """
    title = _escaped(f"hf-mps audit {audit.target}", ":,")
    lines = []
    for entry in audit.found:
        level = "error" if entry.kind == "refused" else "warning"
        text = f"{entry.operator}: {_short(entry.kind)}; {entry.calls} calls ({entry.where}); {entry.link}"
        lines.append(f"::{level} title={title}::{_escaped(text)}")
    return "\n".join(lines or [f"::notice title={title}::all {len(audit.entries)} operators run on Metal"])


def badge(audit: Audit) -> str:
    """A line of Markdown for a README: a static badge of shields.io with the number of operators that fall back."""
    refused, fallbacks = len(audit.of("refused")), len(audit.of("fallback"))
    words, colour = "runs on Metal", "brightgreen"
    if fallbacks:
        words, colour = f"{fallbacks} fallback{'s' if fallbacks > 1 else ''}", "yellow"
    if refused:
        words, colour = f"{refused} refused", "red"
    return f"![Metal: {words}](https://img.shields.io/badge/Metal-{words.replace(' ', '_')}-{colour})"


def _table(entries: Iterable[Entry]) -> list[str]:
    rows = [(each.operator, each.kind, f"{each.calls:,}", ", ".join(each.dtypes), each.where) for each in entries]
    heads = ("operator", "kind", "calls", "dtypes", "where")
    widths = [max(len(row[column]) for row in [heads, *rows]) for column in range(len(heads) - 1)]
    return [
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]])
        for row in [heads, *rows]
    ]


def _short(kind: Kind) -> str:
    return KINDS[kind].partition(":")[0]


def _escaped(text: str, further: str = "") -> str:
    for letter in "%\r\n" + further:
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


def link(kind: Kind) -> str | None:
    """Where a finding is tracked, or what mends it."""
    return {"fallback": TRACKER, "refused": FLOAT64}.get(kind)
