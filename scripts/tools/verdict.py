"""A verdict on releases of PyTorch before a Mac runs them, from their macOS wheels: what is new and wrong comes first.

    python scripts/tools/verdict.py 2.13.0 2.14.1 2.15.0
    python scripts/tools/verdict.py 2.15.0 NIGHTLY --jobs 2 --page verdict.md

Each release (`hf-mps kernels fetch RELEASE`, or `--wheel PATH` for a nightly one) is compared with the one before: the
kernels that came, went or changed, the operators that are launched in another way, the cases of PyTorch's own samples
that agree with float64, what three models' steps launch, and the program of each fault that
scripts/conformance/facts.py has. The page reads as a comment for PyTorch's maintainers; the same as JSON stands beside
it, every case in `--cases`. Under an hour for three releases on two cores.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from hf_mps.core.errors import UserError, run_command
from hf_mps.metal.kernels import metallib, store
from hf_mps.metal.operators.launch_class import of_release
from hf_mps.tools.doctor import versions
from hf_mps.tools.dryrun.audit import audit
from hf_mps.tools.dryrun.launches import Launches
from hf_mps.tools.dryrun.resolve import resolve_target
from scripts.conformance import facts, run, summary
from scripts.conformance.facts import Fact
from scripts.conformance.page import share
from scripts.conformance.run import Wanted

STEPS = {
    "BERT-base, glue/mrpc": ("glue/mrpc",),
    "a decoder with LoRA, sft/chat": ("sft/chat",),
    "ViT-base, image-classification": ("image-classification",),
}
"""The training steps whose launches are counted -> the words of `hf-mps audit`."""
MADE = "<!-- Written by scripts/tools/verdict.py; change the code, not this file. -->"
PREAMBLE = "import torch\n"
LONGEST = 1200
"""Letters of a program that the page shows; a longer one is named by its case."""
NAMED = 12
"""Operators that a line names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Write the verdict that the command line asks for; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="fetched releases, the oldest first")
    parser.add_argument("--page", type=Path, default=Path("verdict.md"), help="the page; its JSON beside it")
    parser.add_argument("--cases", type=Path, help="a JSON file with every case's outcome")
    parser.add_argument("--operator", action="append", default=[], help="its cases alone, as mul or mul.Tensor")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (default %(default)s)")
    given = parser.parse_args(argv)

    def work() -> None:
        metallib.require()
        releases = list(dict.fromkeys(store.present(release) for release in given.releases))
        found = verdict(releases, Wanted(tuple(given.operator), jobs=max(1, given.jobs), quick=True))
        command = " ".join(["python scripts/tools/verdict.py", *releases])
        given.page.write_text("\n".join(page(found, command)) + "\n", encoding="utf-8")
        if given.cases:
            given.cases.write_text(json.dumps(summary.plain(found["cases"])), encoding="utf-8")
        kept = {name: value for name, value in found.items() if name != "cases"}
        given.page.with_suffix(".json").write_text(json.dumps(summary.plain(kept), indent=1) + "\n", encoding="utf-8")
        print(f"{given.page} has the verdict")

    return run_command(work)


def verdict(releases: Sequence[str], wanted: Wanted) -> dict[str, Any]:
    """Return everything that is said of the releases; prints where it is meanwhile."""
    results = {}
    print("PyTorch's samples: running them to see which aten calls they make", flush=True)
    with run.samples(releases[0]) as calls:
        for release in releases:
            results[release] = run.cases(release, calls, wanted)
            print(f"torch {release}: {len(results[release]):,} cases", flush=True)
    report = summary.report(results)
    return {
        "releases": {
            release: {
                **{name: report["releases"][release][name] for name in ("kernels", "cases", "outcomes")},
                "launches": steps(release),
                "programs": {fact.operator: right(fact, release) for fact in facts.FACTS if fact.example},
            }
            for release in releases
        },
        "differences": report["differences"],
        "changes": [{name: _count(value) for name, value in one.items()} for one in report["changes"]],
        "moves": {f"{before} {after}": moves(before, after) for before, after in pairwise(releases)},
        "cases": report["cases"],
    }


def _count(value: Any) -> Any:
    return len(value) if isinstance(value, list) else value


def moves(before: str, after: str) -> dict[str, tuple[str, ...]]:
    """Return the operators that `after` launches in another way, by what became of them; empty where none is known."""
    try:
        return {move: names for move, names in versions.moves(of_release(before), of_release(after)).items() if names}
    except UserError as error:  # a nightly wheel, whose launch classes nobody has read
        print(f"launch classes: {error}", file=sys.stderr)
        return {}


def steps(release: str) -> dict[str, dict[str, Any]]:
    """Return what each step launches on a release; empty where its launch classes are not known."""
    found = {}
    for name, (target, *words) in STEPS.items():
        try:
            launches = audit(resolve_target(target, words), release=release).launches
        except UserError:
            return {}
        if isinstance(launches, Launches):
            found[name] = launches.values()
    return found


def right(fact: Fact, release: str) -> bool | None:
    """Run a fault's program on a release's kernels: whether what it prints is right, None where it does not end so."""
    settings = {
        "HF_MPS_SIMULATE": "1",
        "HF_MPS_KERNELS": release,
        "HF_MPS_GUARDS": f"-{fact.guard}" if fact.guard else "",
    }
    environment = {**os.environ, **{name: value for name, value in settings.items() if value}}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", f"{PREAMBLE}{fact.example}"],
            env=environment,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=run.PATIENCE,
        )
    try:
        # Python has no literal for infinity; a number beyond its range is one.
        came, expected = (ast.literal_eval(line.replace("inf", "1e999")) for line in done.stdout.splitlines()[-2:])
    except (ValueError, SyntaxError):
        return None
    within = 1e-3 if set(fact.dtypes) & set(facts.HALVES) else 1e-5
    return done.returncode == 0 and _alike(came, expected, within)


def _alike(came: Any, expected: Any, within: float) -> bool:
    """Whether numbers, or lists of them, are equal but for the relative error `within`."""
    if isinstance(came, list) and isinstance(expected, list):
        return len(came) == len(expected) and all(_alike(*pair, within) for pair in zip(came, expected, strict=True))
    pairs = ((complex(came).real, complex(expected).real), (complex(came).imag, complex(expected).imag))
    return all(math.isclose(one, other, rel_tol=within, abs_tol=1e-6) for one, other in pairs)


def page(found: Mapping[str, Any], command: str) -> Iterator[str]:
    """Yield the lines of the page: each release against the one before it, the newest first."""
    releases = list(found["releases"])
    yield from ("# PyTorch's releases on Metal, judged by their wheels", "", MADE, "", f"`{command}` wrote this page.")
    yield "Each Metal kernel that a launch rule reaches ran on a CPU, bounded to its buffers, and was compared with"
    yield "float64 ([how](conformance.md)); no Mac was used. A program prints what Metal gives, then what is right."
    yield ""
    yield "| release | kernels | cases that ran | agree | differ | refused |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for release, one in found["releases"].items():
        refused, agrees = (one["outcomes"].get(name, 0) for name in ("refused", "agrees"))
        ran = one["cases"] - refused
        counts = f"{agrees:,} ({share(agrees, ran)}) | {ran - agrees:,} | {refused:,} |"
        yield f"| {release} | {one['kernels']:,} | {ran:,} | {counts}"
    for number in range(len(releases) - 1, -1, -1):
        yield from _release(found, releases[number], releases[number - 1] if number else None)
    yield from ("", "## What a training step launches", "")
    yield f"| | {' | '.join(releases)} |"
    yield f"| --- |{' --- |' * len(releases)}"
    for name in STEPS:
        cells = (_launched(found["releases"][release]["launches"].get(name)) for release in releases)
        yield f"| {name} | {' | '.join(cells)} |"
    yield from ("", "Dispatches and graphs of a step (of them graphs), by the launch classes read from each wheel.")


def _launched(values: Mapping[str, Any] | None) -> str:
    return "not known" if values is None else f"{values['launches']:,} ({values['classes']['graph']:,})"


def _release(found: Mapping[str, Any], release: str, before: str | None) -> Iterator[str]:
    yield from ("", f"## {release}" + (f", after {before}" if before else ""), "")
    wrong = [one for one in found["differences"] if one["cases"].get(release)]
    wrong = [one for one in wrong if one["fact"] is None or one["fact"]["upstream"]]
    new = [one for one in wrong if before is None or not one["cases"].get(before)]
    yield ("**New and wrong.**" if before else "**Wrong.**") + ("" if new else " Nothing found.")
    for one in new:
        yield from ("", *_difference(one, release, before))
    if stays := [one["operator"] for one in wrong if one not in new]:
        yield from ("", f"**Still wrong:** {_names(stays)}.")
    yield from ("", *_programs(found["releases"], release, before))
    if before is None:
        return
    mended = [one for one in found["differences"] if one["cases"].get(before) and not one["cases"].get(release)]
    if names := [one["operator"] for one in mended if one["ran"].get(release)]:
        yield from ("", f"**Agrees now:** {_names(names)}.")
    changed = next(one for one in found["changes"] if (one["before"], one["after"]) == (before, release))
    counts = ", ".join(f"{changed[name]:,} {name}" for name in ("added", "changed", "removed", "same"))
    yield from ("", f"**Kernels:** {counts}; {changed['changed and run']:,} of the changed ones ran here.")
    for move, names in found["moves"][f"{before} {release}"].items():
        yield from ("", f"**Operators that {versions.MOVES[move]}:** {_names(names)}.")


def _difference(one: Mapping[str, Any], release: str, before: str | None) -> Iterator[str]:
    """A difference that the release before has not: where, since when nobody knows, and a program."""
    case, fact = one["smallest"][release], one["fact"]
    first = "; no case of the release before ran" if before and not one["ran"].get(before) else ""
    where = f"{', '.join(one['dtypes'])}; {', '.join(one['layouts'])}"
    count = f"{one['cases'][release]} of {one['ran'][release]} cases{first}"
    yield f"`{one['operator']}` ({where}), {count}: {case['detail']}."
    if fact and fact["example"] and not before:
        yield "The reason and a program are [here](conformance.md#faults-of-pytorchs-that-are-known)."
        return
    if fact:
        yield f"{fact['says']}." + (f" {fact['link']}" if fact["link"] else "")
    program = f"{PREAMBLE}{fact['example']}" if fact and fact["example"] else case["reproduction"]
    if len(program) > LONGEST:
        program = f"{run.COMMAND} {release} --case {case['name']}"
    yield from ("", "```text", *program.splitlines(), "```")


def _programs(releases: Mapping[str, Any], release: str, before: str | None) -> Iterator[str]:
    """What the program of each known fault says of the release."""
    says = {True: "right", False: "wrong", None: "not judged"}
    now = releases[release]["programs"]
    then = releases[before]["programs"] if before else now
    parts = [
        f"`{name}` {says[now[name]]}" + (f" (was {says[then[name]]})" if then[name] != now[name] else "")
        for name in now
    ]
    yield f"**Programs of known faults:** {', '.join(parts)}."


def _names(names: Sequence[str]) -> str:
    kept = list(dict.fromkeys(names))
    more = f", and {len(kept) - NAMED} more" if len(kept) > NAMED else ""
    return ", ".join(f"`{name}`" for name in kept[:NAMED]) + more


if __name__ == "__main__":
    sys.exit(main())
