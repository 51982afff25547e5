"""What can happen, and the ways to say it.

A group is a kind of event with its roles. Its relations are different things that can happen to the same roles: each
is a list of wordings that all mean the same, written `subject | verb | object | rest`. An object can become the subject
of a passive; what cannot stands in the rest. `{A's}` is a possessive, `{N-}` the form before a noun. A `+` after a
subject or object makes it plural, a `-` singular; without either, the last role decides. A `~` before the rest keeps it
behind the `by` of a passive.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# How often an event happened, will, may, was decided against or did not happen; or holds in general.
DECISION = (("done", 0.5), ("planned", 0.2), ("possible", 0.15), ("declined", 0.15))
EVENT = (("done", 0.8), ("denied", 0.2))
PLAN = (("done", 0.6), ("planned", 0.25), ("possible", 0.15))
GENERAL = (("present", 0.85), ("not present", 0.15))


@dataclass(frozen=True)
class Wording:
    """One way to say a relation: where its subject, verb, object and the rest stand."""

    subject: str
    verb: str
    object: str = ""
    rest: str = ""


@dataclass(frozen=True)
class Relation:
    """One thing that can happen, with all its wordings."""

    name: str
    wordings: tuple[Wording, ...]


@dataclass(frozen=True)
class Group:
    """Relations over the same roles.

    `roles` maps a letter to a kind of name, noun or amount; `swaps` are the pairs of roles that can be exchanged;
    `sources` are who may be quoted; `extras` what else a sentence of the group may tell (reason, detail).
    """

    name: str
    roles: dict[str, str]
    relations: tuple[Relation, ...]
    standings: tuple[tuple[str, float], ...] = EVENT
    swaps: tuple[str, ...] = ()
    sources: tuple[str, ...] = ("officials", "local media")
    always_sourced: bool = False
    dated: bool = True
    extras: frozenset[str] = field(default_factory=frozenset)


def relation(name: str, wordings: str) -> Relation:
    """Read a relation from lines of `subject | verb | object | rest`."""
    lines: Iterable[str] = filter(None, map(str.strip, wordings.splitlines()))
    parsed = tuple(Wording(*(part.strip() for part in line.split("|"))) for line in lines)
    return Relation(name, parsed)
