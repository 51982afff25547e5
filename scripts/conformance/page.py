"""The report as a page: a table by family for each release, the differences with their reproductions, the changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MADE = "<!-- Written by scripts/conformance/report.py; change the code, not this file. -->"
DTYPES = ("float32", "float16", "bfloat16")


def page(report: Mapping[str, Any], command: str) -> str:
    """Markdown."""
    return "\n".join(_lines(report, command)) + "\n"


def _lines(report: Mapping[str, Any], command: str) -> Iterator[str]:
    releases = report["releases"]
    yield from ("# Conformance of PyTorch's Metal kernels", "", MADE, "")
    yield f"`{command}` wrote this page."
    yield "Each kernel that a launch rule reaches ran on this CPU, with every access bounded to the buffers that were"
    yield "bound, and was compared with the CPU's result in float64. The calls are"
    yield "PyTorch's own samples (OpInfo and torch.distributions forward and backward, OptimizerInfo), or arguments"
    yield "made from the operator's schema where no sample calls it, varied by dtype, layout (dense, transposed,"
    yield "strided, with a storage offset, broadcast) and size (small, one element, empty, large). The CPU's tensors"
    yield "are dense: its own kernels are wrong for some layouts. [How the kernels run here](kernels.md)."
    yield ""
    yield from _totals(releases)
    for release, found in releases.items():
        yield from _families(release, found)
    counts = {release: found["cases"] for release, found in releases.items()}
    yield from _differences(report["differences"], report["unseen"], counts)
    yield from _conditioned(report["conditioned"])
    yield from _inaccurate(report["inaccurate"])
    yield from _changes(report["changes"])
    yield from _refusals(releases)


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
    yield ""
    yield "Not reached: kernels of the release that no case launched. Refused: no rule covers the call on that"
    yield "release (its work is MPSGraph there, or the kernel's bindings differ from what the rule binds); the reasons"
    yield "are at the end. A case agrees where its error is within torch.testing's tolerances (two units in the last"
    yield "place of a half), or within eight times the CPU's own in the same call; where the CPU has no kernel for the"
    yield "dtype, within that tolerance of the largest argument. Above that it agrees where the exact result of"
    yield "arguments that are some units in their last place off is as far away; those are listed. What an operator"
    yield "leaves for its own gradient alone, the factor of a matrix that has none and the choice among equal values"
    yield "are not compared."


def share(part: int, whole: int) -> str:
    """A share in percent, never rounded up to 100."""
    return "100 %" if part == whole else f"{min(100 * part / whole, 99.99):.2f} %"


def _families(release: str, found: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"## {release} by family", "")
    yield "Errors are the largest of the cases that agree, in units in the last place; in brackets the CPU's own in the"
    yield "same cases. Sums near zero make both large."
    yield ""
    yield f"| family | operators | kernels | cases | differ | refused | {' | '.join(DTYPES)} |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name, row in found["families"].items():
        if row["ran"]:
            errors = " | ".join(_error(row["errors"][dtype]) for dtype in DTYPES)
            numbers = " | ".join(f"{row[each]:,}" for each in ("operators", "kernels", "ran", "differs", "refused"))
            yield f"| {name} | {numbers} | {errors} |"


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


def _conditioned(found: list[Any]) -> Iterator[str]:
    yield from ("", "## Agree within the change of their arguments", "")
    yield "Errors above the tolerance by at most four times the result's change where the arguments change in their"
    yield "last place: sums in another order, differences of near numbers, functions beside a pole."
    yield ""
    yield "| operator | dtypes | cases | units in the last place | case |"
    yield "| --- | --- | ---: | ---: | --- |"
    for one in found:
        name, error = one["case"]["name"], _number(one["case"]["error"])
        yield f"| {one['operator']} | {', '.join(one['dtypes'])} | {one['cases']} | {error} | `{name}` |"


def _inaccurate(found: list[Any]) -> Iterator[str]:
    yield from ("", "## Inaccurate results within the tolerance", "")
    yield "Errors of small results, 64 times the CPU's own or more, that the absolute tolerance lets pass."
    yield ""
    yield "| operator | dtype | release | units in the last place | the CPU's | case |"
    yield "| --- | --- | --- | ---: | ---: | --- |"
    for one in found:
        case = one["case"]
        numbers = f"{_number(case['error'])} | {_number(case['own_error'])}"
        yield f"| {one['operator']} | {one['dtype']} | {one['release']} | {numbers} | `{case['name']}` |"


def _changes(found: list[Any]) -> Iterator[str]:
    yield from ("", "## Kernels that changed between releases", "")
    yield "By the digest of their instructions, names and metadata left out, for kernels of one name in both."
    yield ""
    yield "| from | to | same | changed | of them run here | added | removed |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: |"
    for one in found:
        counts = " | ".join(f"{len(one[name]):,}" for name in ("changed", "changed and run", "added", "removed"))
        yield f"| {one['before']} | {one['after']} | {one['same']:,} | {counts} |"


def _refusals(releases: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", "## Why cases were refused", "")
    yield "The ten most frequent reasons of each release; the JSON has all."
    for release, found in releases.items():
        yield from ("", f"| {release} | cases |", "| --- | ---: |")
        for reason, count in list(found["refused"].items())[:10]:
            yield f"| {reason.replace('|', chr(92) + '|')} | {count:,} |"
