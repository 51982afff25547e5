"""Compare each kernel that a launch rule reaches with float64 on the CPU, and releases with one another.

    python scripts/conformance/report.py 2.13.0 2.14.1 [--quick] [--operator mul] [--case NAME] [--jobs N]

Every access is bounded to the buffers that were bound. A page and a JSON file show how many cases agree, the largest
errors beside the CPU's own, what differs with a program to paste, and the kernels that changed. The cases are PyTorch's
own samples. A release (`hf-mps kernels fetch RELEASE`) takes some minutes the first time: its kernels are compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_mps.core.errors import RunError, run_command
from hf_mps.metal.kernels import modules, store
from scripts.conformance import run, summary
from scripts.conformance.page import page, tables
from scripts.conformance.run import COMMAND, Wanted


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report that the command line asks for; return its exit code."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="fetched releases, as 2.13.0")
    parser.add_argument(
        "--page", type=Path, default=Path("conformance.md"), help="the page; its tables beside it, .json"
    )
    parser.add_argument("--json", type=Path, default=Path("conformance-cases.json"), help="every case's outcome")
    parser.add_argument("--operator", action="append", default=[], help="its cases alone, as mul or mul.Tensor")
    parser.add_argument("--case", default="", help="one case alone, as the page and the JSON name it")
    parser.add_argument("--quick", action="store_true", help="one call of each operator, dtype and layout; int64 alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args(argv)

    def work() -> None:
        modules.require()
        chosen = list(dict.fromkeys(store.present(release) for release in given.releases))
        wanted = Wanted(tuple(given.operator), given.case, max(1, given.jobs), given.quick)
        for line in write(chosen, wanted, given.page, given.json):
            print(line, flush=True)

    return run_command(work)


def write(releases: Sequence[str], wanted: Wanted, markdown: Path, details: Path) -> Iterator[str]:
    """Run the cases and write the page, its tables and the JSON; yield what is to be said meanwhile.

    Raises RunError where no case is named so, or a worker stops for a reason that is no kernel's.
    """
    results = {}
    yield "PyTorch's samples: running them to see which aten calls they make"
    with run.samples(_of_samples(releases, wanted)) as calls:
        for release in releases:
            results[release] = run.cases(release, calls, wanted)
            yield f"torch {release}: {len(results[release]):,} cases"
    if not any(results.values()):
        raise RunError("there is no such case; next: leave out --operator and --case")
    found = summary.report(results)
    command = " ".join([COMMAND, *releases, *(f"--operator {each}" for each in wanted.operators)])
    command += " --quick" if wanted.quick else ""
    markdown.write_text(page(found, command), encoding="utf-8")
    markdown.with_suffix(".json").write_text(tables(found), encoding="utf-8")
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


if __name__ == "__main__":
    sys.exit(main())
