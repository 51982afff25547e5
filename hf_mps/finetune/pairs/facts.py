"""A fact is what a sentence says, apart from how it says it; a change of one part makes it a different fact."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hf_mps.finetune.pairs import business, public, world
from hf_mps.finetune.pairs.draws import Draws
from hf_mps.finetune.pairs.lexicon import NAMES, NOUNS, Value, name
from hf_mps.finetune.pairs.quantities import AMOUNTS, DAYS, amount, date
from hf_mps.finetune.pairs.relations import Group, Relation

GROUPS: tuple[Group, ...] = business.GROUPS + public.GROUPS + world.GROUPS

# What else can be told of a company or a person: the kind of its amount or name.
_COMPANY_DETAILS = {"staff": "staff", "since": "since", "seat": "city"}
_PERSON_DETAILS = {"age": "age", "home": "city"}
_DETAILS = {
    "company": _COMPANY_DETAILS,
    "airline": _COMPANY_DETAILS,
    "person": _PERSON_DETAILS,
    "politician": _PERSON_DETAILS,
}

# In how many parts the facts of a pair differ, and how often in which, among those that the fact has. One alone is
# hard: who did it to whom, above all, takes a small model more pairs than a quickstart has time for.
HOW_MANY = ((1, 0.5), (2, 0.3), (3, 0.2))
HOW_OFTEN = {
    "swap": 2.0,
    "relation": 2.0,
    "standing": 1.0,
    "share": 1.0,
    "amount": 2.0,
    "name": 2.0,
    "noun": 1.5,
    "date": 1.5,
    "reason": 1.0,
    "detail": 1.0,
}
# Two of these can undo each other: not larger than, smaller than; all are for it, none is against it.
_OPPOSITES = frozenset({"swap", "relation", "standing", "share"})


@dataclass(frozen=True)
class Detail:
    """Something else told of the one in a role: a company's staff, a person's age."""

    kind: str
    role: str
    value: Value


@dataclass(frozen=True)
class Fact:
    """An event of a group: which relation, how it stands, who and what fills the roles, when, why, by whose word."""

    group: Group
    relation: Relation
    standing: str
    values: dict[str, Value]
    source: str
    date: Value | None = None
    reason: Value | None = None
    detail: Detail | None = None


def value(kind: str, draws: Draws, held_out: bool) -> Value:
    """Draw what can fill a role of a kind: a name, a noun or an amount."""
    if kind in NAMES:
        return name(kind, draws, held_out)
    return draws.pick(NOUNS[kind]) if kind in NOUNS else amount(kind, draws)


def _other(kind: str, taken: set[str], draws: Draws, held_out: bool) -> Value:
    while (drawn := value(kind, draws, held_out)).stem in taken:
        pass
    return drawn


def draw(draws: Draws, held_out: bool) -> Fact:
    """Draw a fact at random, with the names of the training set or with those held out for validation."""
    group = draws.pick(GROUPS)
    values: dict[str, Value] = {}
    for role, kind in group.roles.items():
        values[role] = _other(kind, {filled.stem for filled in values.values()}, draws, held_out)
    owners = [role for role in "AB" if group.roles.get(role) in _DETAILS]
    detail = None
    if "detail" in group.extras and draws.chance(0.3):
        role = draws.pick(owners)
        detail = _detail(group.roles[role], role, values, draws, held_out)
    return Fact(
        group=group,
        relation=draws.pick(group.relations),
        standing=draws.weighted(group.standings),
        values=values,
        source=draws.pick(group.sources),
        date=date(draws) if group.dated and draws.chance(0.6) else None,
        reason=draws.pick(NOUNS["reason"]) if "reason" in group.extras and draws.chance(0.25) else None,
        detail=detail,
    )


def _detail(owner: str, role: str, values: dict[str, Value], draws: Draws, held_out: bool) -> Detail:
    kind, filler = draws.pick(tuple(_DETAILS[owner].items()))
    return Detail(kind, role, _other(filler, {filled.stem for filled in values.values()}, draws, held_out))


def changes(fact: Fact) -> list[tuple[str, str]]:
    """Return the single changes that make a different fact of this one, as (kind of change, what changes)."""
    found = [("swap", pair) for pair in fact.group.swaps]
    for role, kind in fact.group.roles.items():
        found.append((_kind_of_change(kind), role))
    if len(fact.group.relations) > 1:
        found.append(("relation", ""))
    if len(fact.group.standings) > 1:
        found.append(("standing", ""))
    return found + [(part, "") for part in ("date", "reason", "detail") if getattr(fact, part) is not None]


def _kind_of_change(kind: str) -> str:
    if kind in NAMES:
        return "name"
    if kind == "share":
        return "share"
    return "amount" if kind in AMOUNTS else "noun"


def change(fact: Fact, draws: Draws, held_out: bool) -> Fact:
    """Return the fact with one to three parts changed, so that it says something else in much the same words."""
    found = changes(fact)
    for _ in range(draws.weighted(HOW_MANY)):
        kind, what = draws.weighted([((kind, what), HOW_OFTEN[kind]) for kind, what in found])
        fact = _changed(fact, kind, what, draws, held_out)
        found = [one for one in found if one != (kind, what) and not (kind in _OPPOSITES and one[0] in _OPPOSITES)]
        if not found:
            break
    return fact


def _changed(fact: Fact, kind: str, what: str, draws: Draws, held_out: bool) -> Fact:
    if kind == "swap":
        return _swapped(fact, what)
    if kind == "relation":
        return replace(fact, relation=draws.pick([one for one in fact.group.relations if one is not fact.relation]))
    if kind == "standing":
        return replace(fact, standing=draws.weighted([one for one in fact.group.standings if one[0] != fact.standing]))
    if kind == "date":
        return replace(fact, date=_unlike(fact.date, draws))
    if kind == "reason":
        return replace(fact, reason=draws.pick([one for one in NOUNS["reason"] if one != fact.reason]))
    taken = {filled.stem for filled in fact.values.values()}
    if fact.detail:
        taken.add(fact.detail.value.stem)
    if kind == "detail" and fact.detail:
        filler = _DETAILS[fact.group.roles[fact.detail.role]][fact.detail.kind]
        return replace(fact, detail=replace(fact.detail, value=_other(filler, taken, draws, held_out)))
    return replace(fact, values={**fact.values, what: _other(fact.group.roles[what], taken, draws, held_out)})


def _swapped(fact: Fact, pair: str) -> Fact:
    """Exchange two roles; a detail goes with the one it is about."""
    one, other = pair[0], pair[1]
    values = {**fact.values, one: fact.values[other], other: fact.values[one]}
    detail = fact.detail
    if detail and detail.role in pair:
        detail = replace(detail, role=other if detail.role == one else one)
    return replace(fact, values=values, detail=detail)


def _unlike(old: Value | None, draws: Draws) -> Value:
    """Draw another date of the same sort: a day for a day, a month for a month."""
    while (new := date(draws)) == old or (old is not None and (new.stem in DAYS) != (old.stem in DAYS)):
        pass
    return new
