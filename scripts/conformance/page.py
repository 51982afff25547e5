"""The report as a page, with the differences and their reproductions, and its longer tables as data beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MADE = "<!-- Written by scripts/conformance/report.py; change the code, not this file. -->"
DTYPES = ("float32", "float16", "bfloat16")


HEAD = """
Each kernel that a launch rule reaches ran on this CPU ([how](kernels.md)), every access bounded to the buffers that
were bound, and was compared with the CPU's result in float64. The calls are PyTorch's own samples (OpInfo and
torch.distributions forward and backward, OptimizerInfo), or arguments made from the operator's schema where no sample
calls it, varied by dtype, layout (dense, transposed, strided, with a storage offset, broadcast) and size (small, one
element, empty, large). The CPU's tensors are dense: its own kernels are wrong for some layouts.
"""
TAIL = """
Not reached: no case launched the kernel. Refused: no rule covers the call on that release, for most because its work is
MPSGraph there. A case agrees where its error is within torch.testing's tolerances (two units in the last place of a
half), or within eight times the CPU's own; where the CPU has no kernel for the dtype, within that tolerance of the
largest argument; or where the exact result of arguments that are some units in their last place off is as far away.
What an operator leaves for its own gradient alone, the factor of a matrix that has none and the choice among equal
values are not compared.

[conformance.json](conformance.json) has the errors by family (the largest of the cases that agree, in units in the
last place, the CPU's own in brackets), inaccurate results within the tolerance, the kernels that changed between
releases, and the reasons of refusals.
"""


def page(report: Mapping[str, Any], command: str) -> str:
    """Markdown."""
    return "\n".join(_lines(report, command)) + "\n"


def _lines(report: Mapping[str, Any], command: str) -> Iterator[str]:
    releases = report["releases"]
    yield from ("# Conformance of PyTorch's Metal kernels", "", MADE, "", f"`{command}` wrote this page.")
    yield from (HEAD.strip(), "")
    yield from _totals(releases)
    yield from ("", TAIL.strip())
    counts = {release: found["cases"] for release, found in releases.items()}
    yield from _differences(report["differences"], report["unseen"], counts)


def tables(report: Mapping[str, Any]) -> str:
    """Return the tables of the report as JSON: columns and rows by title, a row a line."""
    releases = report["releases"]
    families = ("family", "operators", "kernels", "cases", "differ", "refused", *DTYPES)
    found: dict[str, tuple[Sequence[str], list[Sequence[str]]]] = {}
    for release, one in releases.items():
        found[f"{release} by family"] = families, list(_families(one))
    heads: Sequence[str] = ("operator", "dtypes", "cases", "units in the last place", "case")
    found["Agree within the change of their arguments"] = heads, list(map(_conditioned, report["conditioned"]))
    heads = ("operator", "dtype", "release", "units in the last place", "the CPU's", "case")
    found["Inaccurate results within the tolerance"] = heads, list(map(_inaccurate, report["inaccurate"]))
    heads = ("from", "to", "same", "changed", "of them run here", "added", "removed")
    found["Kernels that changed between releases"] = heads, list(map(_changed, report["changes"]))
    for release, one in releases.items():
        reasons = [(reason, f"{count:,}") for reason, count in list(one["refused"].items())[:10]]
        found[f"Why cases of {release} were refused"] = ("reason", "cases"), reasons
    parts = []
    for title, (columns, rows) in found.items():
        lines = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in rows)
        columns_line = json.dumps(columns, ensure_ascii=False)
        parts.append(f'  {json.dumps(title)}: {{"columns": {columns_line}, "rows": [\n{lines}\n  ]}}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _totals(releases: Mapping[str, Any]) -> Iterator[str]:
    yield "| release | operators that ran | kernels run | not reached | cases that ran | agree | differ | refused |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for release, found in releases.items():
        outcomes = found["outcomes"]
        agrees, refused = outcomes.get("agrees", 0), outcomes.get("refused", 0)
        ran = found["cases"] - refused
        yield (
            f"| {release} | {len(found['operators'])} | {len(found['reached']):,} | {found['not reached']:,} of "
            f"{found['kernels']:,} | {ran:,} | {agrees:,} ({share(agrees, ran)}) | {ran - agrees:,} | {refused:,} |"
        )


def share(part: int, whole: int) -> str:
    """A share in percent, never rounded up to 100."""
    return "100 %" if part == whole else f"{min(100 * part / whole, 99.99):.2f} %"


def _families(found: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Errors are the largest of the cases that agree, in units in the last place; in brackets the CPU's own."""
    for name, row in found["families"].items():
        if row["ran"]:
            numbers = (f"{row[each]:,}" for each in ("operators", "kernels", "ran", "differs", "refused"))
            yield name, *numbers, *(_error(row["errors"][dtype]) for dtype in DTYPES)


def _error(pair: tuple[float, float] | None) -> str:
    return "" if pair is None else f"{_number(pair[0])} ({_number(pair[1])})"


def _number(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}" if value < 1e6 else f"{value:.0e}"


def _differences(found: list[Any], unseen: list[Any], cases: Mapping[str, int]) -> Iterator[str]:
    upstream = [one for one in found if one["fact"] and one["fact"]["upstream"]]
    explained = [one for one in found if one["fact"] and not one["fact"]["upstream"]]
    unknown = [one for one in found if not one["fact"]]
    yield from ("", "## Faults of PyTorch's that are known", "")
    yield from _list(upstream, cases)
    for fact in unseen:
        yield f"**{fact['operator']}** ({', '.join(fact['dtypes']) or 'all dtypes'}). {_says(fact)}"
        yield from ("No case of this run shows it.", "", *_example(fact))
    yield from ("", "## Differences with a reason", "")
    yield from _list(explained, cases)
    yield from ("", "## Differences that nobody has explained", "")
    yield from _list(unknown, cases)


def _list(found: list[Any], cases: Mapping[str, int]) -> Iterator[str]:
    if not found:
        yield "Nothing found in " + ", ".join(f"{count:,} cases of {release}" for release, count in cases.items()) + "."
        return
    for one in found:
        yield from _one(one)


def _one(one: Mapping[str, Any]) -> Iterator[str]:
    counts = ", ".join(f"{release} {one['cases'].get(release, 0)} of {ran}" for release, ran in one["ran"].items())
    where = f"{', '.join(one['dtypes'])}; {', '.join(one['layouts'])}"
    yield f"**{one['operator']}** {one['outcome']} ({where}). Cases: {counts}."
    fact = one["fact"]
    if fact:
        yield _says(fact)
    release, case = next(iter(one["smallest"].items()))
    kernels = ", ".join(f"`{name}`" for name in case["kernels"][:3]) or "no kernel to its end"
    yield f"On {release}, `{case['name']}`, {kernels}: {case['detail']}."
    if fact and fact["example"]:
        yield from ("", *_example(fact, release))
    else:
        yield from ("", "```sh", *case["reproduction"].splitlines(), "```", "")


def _says(fact: Mapping[str, Any]) -> str:
    link = f" [{fact['link'].split('github.com/')[-1]}]({fact['link']})" if fact["link"] else ""
    return f"{fact['says']}.{link}"


def _example(fact: Mapping[str, Any], release: str = "2.13.0") -> Iterator[str]:
    """A program that prints what the kernels give, and then what is right."""
    if fact["example"]:
        guard = f"HF_MPS_GUARDS=-{fact['guard']} " if fact["guard"] else ""
        head = f"HF_MPS_SIMULATE=1 HF_MPS_KERNELS={release} {guard}python - <<'END'"
        yield from ("```sh", head, "import torch", *fact["example"].splitlines(), "END", "```", "")


def _conditioned(one: Mapping[str, Any]) -> Sequence[str]:
    """Errors of at most four times the result's change where the last place of the arguments changes."""
    case = one["case"]
    return one["operator"], ", ".join(one["dtypes"]), str(one["cases"]), _number(case["error"]), f"`{case['name']}`"


def _inaccurate(one: Mapping[str, Any]) -> Sequence[str]:
    """Errors of small results, 64 times the CPU's own or more, that the absolute tolerance lets pass."""
    case, errors = one["case"], (_number(one["case"]["error"]), _number(one["case"]["own_error"]))
    return one["operator"], one["dtype"], one["release"], *errors, f"`{case['name']}`"


def _changed(one: Mapping[str, Any]) -> Sequence[str]:
    """By the digest of their instructions, names and metadata left out, for kernels of one name in both."""
    counts = (f"{len(one[name]):,}" for name in ("changed", "changed and run", "added", "removed"))
    return one["before"], one["after"], f"{one['same']:,}", *counts
