"""The report of a run as data: what agreed by family, what did not with a reproduction, which kernels changed."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hf_mps.metal.kernels import store
from scripts.conformance import changes, facts
from scripts.conformance.facts import Fact

Case = Mapping[str, Any]
FAR = 64.0
"""Units in the last place, or times the CPU's own error, from where an error is told though it is small beside 1."""
BAD = ("differs", "out of bounds", "raises", "crash")


def report(results: Mapping[str, Sequence[Case]]) -> dict[str, Any]:
    """Everything that is said of a run, by release; `cases` holds each case's outcome."""
    found = {release: _of_release(release, cases) for release, cases in results.items()}
    launched = {name for cases in results.values() for case in cases for name in case["kernels"]}
    return {
        "releases": found,
        "differences": differences(results),
        "unseen": [fact._asdict() for fact in unseen(results)],
        "conditioned": conditioned(results),
        "inaccurate": inaccurate(results),
        "changes": [_changed(before, after, launched) for before, after in pairwise(results)],
        "cases": {release: [_short(case) for case in cases] for release, cases in results.items()},
    }


def _of_release(release: str, cases: Sequence[Case]) -> dict[str, Any]:
    library = store.open_library(release)
    kernels = {name for case in cases for name in case["kernels"]}
    families = defaultdict(list)
    for case in cases:
        families[case["family"]].append(case)
    refused = Counter(case["detail"] for case in cases if case["outcome"] == "refused")
    return {
        "cases": len(cases),
        "outcomes": dict(Counter(case["outcome"] for case in cases)),
        "operators": sorted({case["rule"] for case in cases if case["outcome"] != "refused"}),
        "kernels": len(library),
        "reached": sorted(kernels),
        "not reached": len(library) - len(kernels & set(library)),
        "families": {name: _family(families[name]) for name in sorted(families) if name},
        "refused": dict(refused.most_common()),
    }


def _family(cases: Sequence[Case]) -> dict[str, Any]:
    ran = [case for case in cases if case["outcome"] != "refused"]
    outcomes = Counter(case["outcome"] for case in cases)
    return {
        "operators": len({case["rule"] for case in ran}),
        "kernels": len({name for case in ran for name in case["kernels"]}),
        "ran": len(ran),
        "agrees": outcomes["agrees"],
        "differs": sum(outcomes[each] for each in BAD),
        "refused": outcomes["refused"],
        "errors": {dtype: _errors(ran, dtype) for dtype in ("float32", "float16", "bfloat16")},
    }


def _errors(cases: Iterable[Case], dtype: str) -> tuple[float, float] | None:
    """The largest error in units in the last place and the CPU's own, of the cases that agree."""
    found = [case for case in cases if case["dtype"] == dtype and case["outcome"] == "agrees"]
    pairs = [(case["error"], case["own_error"]) for case in found if math.isfinite(case["error"])]
    return (max(one for one, _ in pairs), max(own for _, own in pairs)) if pairs else None


def differences(results: Mapping[str, Sequence[Case]]) -> list[dict[str, Any]]:
    """What does not agree, by operator, kind and known fact: releases, dtypes, kernels, the smallest cases."""
    groups: dict[tuple[str, str, Fact | None], list[tuple[str, Case]]] = defaultdict(list)
    for release, cases in results.items():
        for case in cases:
            if case["outcome"] in BAD:
                groups[case["rule"], case["outcome"], facts.known(release, case)].append((release, case))
    ran = {
        release: Counter(case["rule"] for case in cases if case["outcome"] != "refused")
        for release, cases in results.items()
    }
    ordered = sorted(groups.items(), key=lambda item: item[0][:2])
    return [
        {
            "operator": rule,
            "outcome": outcome,
            "cases": dict(Counter(release for release, _ in found)),
            "ran": {release: counts[rule] for release, counts in ran.items()},
            "dtypes": sorted({case["dtype"] for _, case in found}),
            "layouts": sorted({case["layout"] for _, case in found}),
            "kernels": sorted({name for _, case in found for name in case["kernels"]}),
            "fact": None if fact is None else fact._asdict(),
            "smallest": {release: _smallest(release, found) for release in dict.fromkeys(each for each, _ in found)},
        }
        for (rule, outcome, fact), found in ordered
    ]


def unseen(results: Mapping[str, Sequence[Case]]) -> list[Fact]:
    """PyTorch's faults that a release of the run has and none of its cases shows."""
    shown = {
        facts.known(release, case) for release, cases in results.items() for case in cases if case["outcome"] in BAD
    }
    return [
        fact
        for fact in facts.FACTS
        if fact.upstream and fact not in shown and not all(facts.mended(fact, release) for release in results)
    ]


def conditioned(results: Mapping[str, Sequence[Case]]) -> list[dict[str, Any]]:
    """Operators with cases that agree by the change of their arguments alone: how many, and the largest error."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for cases in results.values():
        for case in cases:
            if case["outcome"] == "agrees" and case.get("conditioned"):
                groups[case["rule"]].append(case)
    return [
        {
            "operator": rule,
            "cases": len(found),
            "dtypes": sorted({case["dtype"] for case in found}),
            "case": dict(max(found, key=lambda case: _told(case["error"]))),
        }
        for rule, found in sorted(groups.items())
    ]


def _told(error: float) -> float:
    return error if math.isfinite(error) else 0.0


def _smallest(release: str, found: Sequence[tuple[str, Case]]) -> dict[str, Any]:
    cases = [dict(case) for each, case in found if each == release]
    return min(cases, key=_size)


def inaccurate(results: Mapping[str, Sequence[Case]]) -> list[dict[str, Any]]:
    """Operators whose error is within the tolerance and yet FAR times the CPU's own, by dtype: the largest case."""
    worst: dict[tuple[str, str], tuple[float, str, Case]] = {}
    for release, cases in results.items():
        for case in cases:
            if case["outcome"] != "agrees" or case["own_error"] == 0 or not math.isfinite(case["error"]):
                continue
            kind = case["rule"], case["dtype"]
            if case["error"] > FAR * max(1.0, case["own_error"]) and case["error"] > worst.get(kind, (0.0,))[0]:
                worst[kind] = case["error"], release, case
    ordered = sorted(worst.items(), key=lambda item: -item[1][0])
    return [
        {"operator": rule, "dtype": dtype, "release": release, "case": dict(case)}
        for (rule, dtype), (_, release, case) in ordered
    ]


def _size(case: Case) -> tuple[int, str]:
    return case["elements"], case["name"]


def _changed(before: str, after: str, launched: set[str]) -> dict[str, Any]:
    found = changes.between(before, after)
    return {**found._asdict(), "changed and run": sorted(launched & set(found.changed)), "same": len(found.same)}


def _short(case: Case) -> dict[str, Any]:
    kept = ("name", "outcome", "kernels", "detail", "error", "own_error", "conditioned")
    return {name: _finite(case[name]) for name in kept if case.get(name) not in (None, "", [], False)}


def _finite(value: Any) -> Any:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def plain(value: Any) -> Any:
    """A report as JSON can hold it."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return _finite(value)
