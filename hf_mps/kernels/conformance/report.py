"""The verb's run: the cases of each release, then the page and the JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from hf_mps.core.errors import RunError
from hf_mps.kernels import store
from hf_mps.kernels.conformance import run, summary
from hf_mps.kernels.conformance.page import page
from hf_mps.kernels.conformance.run import Wanted


def write(releases: Sequence[str], wanted: Wanted, markdown: Path, details: Path) -> Iterator[str]:
    """Run the cases and write the page and the JSON; yield what is to be said meanwhile.

    Raises RunError where no case is named so, or a worker stops for a reason that is no kernel's.
    """
    results = {}
    yield "PyTorch's samples: running them to see which aten calls they make"
    with run.samples(_of_samples(releases, wanted)) as calls:
        for release in releases:
            results[release] = run.cases(release, calls, wanted)
            yield f"torch {release}: {len(results[release]):,} cases"
    if not any(results.values()):
        raise RunError("there is no such case; next: hf-mps kernels report RELEASE without --operator and --case")
    found = summary.report(results)
    command = " ".join(["hf-mps kernels report", *releases, *(f"--operator {each}" for each in wanted.operators)])
    command += " --quick" if wanted.quick else ""
    markdown.write_text(page(found, command), encoding="utf-8")
    details.write_text(json.dumps(summary.plain(found)), encoding="utf-8")
    for release, one in found["releases"].items():
        outcomes = one["outcomes"]
        ran = one["cases"] - outcomes.get("refused", 0)
        agrees = outcomes.get("agrees", 0)
        yield f"torch {release}: {agrees:,} of {ran:,} cases that ran agree, {len(one['reached']):,} kernels"
    for one in found["differences"]:
        counts = ", ".join(f"{release} {count}" for release, count in one["cases"].items())
        fact = one["fact"] or {"says": "not known"}
        yield f"{one['operator']} {one['outcome']}: {counts}; {fact.get('link') or fact['says']}"
    yield f"{markdown} and {details} have the rest"


def _of_samples(releases: Sequence[str], wanted: Wanted) -> str | None:
    """The release whose kernels the samples run on: none, which is quicker, where no gradient is asked for."""
    asked = [*wanted.operators, *filter(None, [wanted.case])]
    if asked and not any("_backward" in each for each in asked):
        return None
    own = store.installed()
    return own if own in store.releases() else releases[0]
