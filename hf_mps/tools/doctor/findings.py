"""The doctor's findings: one line of its report each, printed for people or as JSON."""

from __future__ import annotations

import json as jsons
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import hf_mps
from hf_mps.core.errors import RunError
from hf_mps.core.files import plain
from hf_mps.core.text import counted
from hf_mps.metal.device import simulated

CURED = " (cured here by "
KNOWN = "known problem"
WIDTH = 21
"""Columns of a finding's name: the longest of the stack's packages, sentence-transformers."""
State = Literal["ok", "note", "problem"]
SIGNS: dict[State, str] = {"ok": " ", "note": "·", "problem": "!"}


@dataclass(frozen=True)
class Finding:
    """What was examined, its state, and what to type or read next; `next` is empty only where all is well.

    A `note` is worth knowing and needs nothing; a `problem` keeps training off Metal or makes it wrong.
    """

    name: str
    state: State
    says: str
    next: str = ""


def ok(name: str, says: str) -> Finding:
    """Return a finding that is as it should be."""
    return Finding(name, "ok", says)


def note(name: str, says: str, next: str) -> Finding:
    """Return a finding that needs nothing now."""
    return Finding(name, "note", says, next)


def problem(name: str, says: str, next: str) -> Finding:
    """Return a finding that needs a repair."""
    return Finding(name, "problem", says, next)


def show(
    sections: Iterable[tuple[str, Sequence[Finding]]], also: Mapping[str, Any] | None = None, *, json: bool
) -> None:
    """Print each section when it comes, with a line for each finding and, where that is not well, what to do next.

    JSON comes at the end, and also has the values that `also` has by then. Raises RunError (exit 1), which counts and
    names the problems, where there is one.
    """
    if not json:
        print(f"hf-mps {hf_mps.__version__} doctor", flush=True)
    found: dict[str, Sequence[Finding]] = {}
    for name, section in sections:
        found[name] = section
        if not json:
            _print_section(name, section)
    problems = [finding for section in found.values() for finding in section if finding.state == "problem"]
    if json:
        values = {"hf_mps": hf_mps.__version__, "ready": not problems, "simulated": simulated(), "findings": found}
        print(jsons.dumps(plain({**values, **(also or {})}), indent=2))
    if problems:
        names = ", ".join(dict.fromkeys(finding.name for finding in problems))
        raise RunError(f"doctor: {counted(len(problems), 'problem')}: {names}; next: {problems[0].next}")


def _print_section(name: str, section: Sequence[Finding]) -> None:
    print(f"\n{name}")
    # What a guard cures needs nothing, and takes one line.
    cured = [finding for finding in section if finding.name == KNOWN and CURED in finding.says]
    told = f"{counted(len(cured), 'known problem')} of these versions on this machine, cured here by guards"
    count = [note("cured here", told, "hf-mps doctor --json, which lists them")] if cured else []
    for finding in [*(finding for finding in section if finding not in cured), *count]:
        print(f"{SIGNS[finding.state]} {finding.name:<{WIDTH}}  {finding.says}".rstrip())
        if finding.next:
            print(f"  {'':<{WIDTH}}  next: {finding.next}")
    sys.stdout.flush()
