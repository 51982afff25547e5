"""The report of a run as data: what agreed by family, what did not with a reproduction, which kernels changed."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hf_mps.kernels import store
from hf_mps.kernels.conformance import changes, facts

Case = Mapping[str, Any]
BAD = ("differs", "out of bounds", "raises", "crash")


def report(results: Mapping[str, Sequence[Case]]) -> dict[str, Any]:
    """Everything that is said of a run, by release; `cases` holds each case's outcome."""
    found = {release: _of_release(release, cases) for release, cases in results.items()}
    launched = {name for cases in results.values() for case in cases for name in case["kernels"]}
    return {
        "releases": found,
        "differences": differences(results),
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
    """What does not agree, by operator and kind: releases, dtypes, kernels, and the smallest case of each release."""
    groups: dict[tuple[str, str], list[tuple[str, Case]]] = defaultdict(list)
    for release, cases in results.items():
        for case in cases:
            if case["outcome"] in BAD:
                groups[case["rule"], case["outcome"]].append((release, case))
    return [_difference(rule, outcome, found, results) for (rule, outcome), found in sorted(groups.items())]


def _difference(
    rule: str, outcome: str, found: list[tuple[str, Case]], results: Mapping[str, Sequence[Case]]
) -> dict[str, Any]:
    kernels = sorted({name for _, case in found for name in case["kernels"]})
    smallest = {
        release: min((case for each, case in found if each == release), key=_size)
        for release in dict.fromkeys(each for each, _ in found)
    }
    fact = facts.known(rule, kernels)
    ran = {
        release: sum(case["rule"] == rule and case["outcome"] != "refused" for case in cases)
        for release, cases in results.items()
    }
    return {
        "operator": rule,
        "outcome": outcome,
        "cases": dict(Counter(release for release, _ in found)),
        "ran": ran,
        "dtypes": sorted({case["dtype"] for _, case in found}),
        "layouts": sorted({case["layout"] for _, case in found}),
        "kernels": kernels,
        "fact": None if fact is None else fact._asdict(),
        "smallest": {release: dict(case) for release, case in smallest.items()},
    }


def _size(case: Case) -> tuple[int, str]:
    return case["elements"], case["name"]


def _changed(before: str, after: str, launched: set[str]) -> dict[str, Any]:
    found = changes.between(before, after)
    return {**found._asdict(), "changed and run": sorted(launched & set(found.changed)), "same": len(found.same)}


def _short(case: Case) -> dict[str, Any]:
    kept = ("name", "outcome", "kernels", "detail", "error", "own_error")
    return {name: _finite(case[name]) for name in kept if case.get(name) not in (None, "", [])}


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
