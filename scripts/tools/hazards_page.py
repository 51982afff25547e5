"""The text of docs/hazards.md: from what guards, sentinels, the doctor and the simulated device say of each hazard.

scripts/tools/docs.py writes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.catalogue import SENTINELS, registry
from hf_mps.metal.device.faults import FAULTS, SIMULATED, Fault

# A guard's folder -> the heading and the sentence above its guards, in the order of the page.
GROUPS = {
    "numerics": ("Wrong numbers", "Metal's kernels compute something else than the CPU, mostly without an error."),
    "resume": ("Resume", "A stopped run continues differently from an unbroken one."),
    "platform": ("Platform", "What a Mac, its memory or a library on it lacks or does differently."),
}
SUM = """
{guards} guards cure or report known hazards of training on Metal, and {sentinels} sentinels look for signs of unknown
ones. A guard acts only on the chips, systems and releases that have its fault, and only on tensors of the device `mps`.
`HF_MPS_GUARDS=-name,-name` switches guards off; `python -c "import hf_mps; print(hf_mps.guards.report())"` says which
are on here and what they did, and `hf-mps doctor --trials` tries the device for every fault that a guard knows.
"""
FAULTS_ABOVE = """
The simulated device also has the faults of the guards above, and these. `HF_MPS_FAULTS=-name,-name` leaves faults out;
[the simulated device](simulator.md#faults-by-name) says more.
"""


def lines() -> Iterator[str]:
    """The lines of the page behind its title."""
    guards = registry().each("guard")
    yield SUM.strip().format(guards=len(guards), sentinels=len(SENTINELS.names))
    for folder, (title, sentence) in GROUPS.items():
        inside = [guard for guard in guards if type(guard).__module__.split(".")[-2] == folder]
        yield from ("", f"## {title}", "", sentence, "")
        yield from _table(("guard", "without it", "with it", "where", "source"), map(_guard, inside))
    yield from ("", "## Sentinels", "", "A sentinel looks at every training on the device, whatever its loop.", "")
    yield from _table(("sentinel", "looks for", "what it does then"), map(_sentinel, SENTINELS.names))
    yield from ("", "`HF_MPS_SENTINELS=-name,-name` switches sentinels off.")
    yield from ("", "## Known problems that no guard cures", "")
    yield from ("`hf-mps doctor` names those of the installed versions.", "")
    heads = ("where", "what is wrong", "source")
    uncured = {name: fault for name, fault in FAULTS.items() if not fault.guard}
    yield from _table(("package", *heads), ((each.package, *_fault(each)) for each in uncured.values() if each.listed))
    yield from ("", "## Faults of the simulated device", "", FAULTS_ABOVE.strip(), "")
    above = {name for guard in guards for name in _names(guard)}
    shown = [name for name in SIMULATED if name not in above]
    yield from _table(("fault", *heads), ((f"`{name}`", *_fault(FAULTS[name])) for name in shown))


def _sentinel(name: str) -> tuple[str, ...]:
    sentinel = registry().get(name)
    return f"`{name}`", sentinel.what, sentinel.why


def _fault(fault: Fault) -> tuple[str, ...]:
    return _where([fault]), fault.what, _link(fault.issue)


def _guard(guard: Guard) -> tuple[str, ...]:
    cured = [FAULTS[name] for name in guard.faults]
    # The address of a row, as a heading would have it: patches.md and messages link there.
    names = ", ".join(f"`{name}`" for name in _names(guard))
    sources = ", ".join(map(_link, _places(guard.issue)))
    return f'<a id="{guard.name}"></a>{names}', guard.what, _effect(guard), _where(cured), sources


def _names(guard: Guard) -> list[str]:
    """The guard's name and those of the simulated faults that it cures."""
    simulated = [name for name, fault in FAULTS.items() if fault.simulated and name in guard.faults]
    return [guard.name, *(name for name in simulated if name != guard.name)]


def _effect(guard: Guard) -> str:
    """What a script gets: the guard's line in the docstring of its file, or of its class."""
    text = sys.modules[type(guard).__module__].__doc__ or ""
    effect = re.search(rf"^{guard.name}: (.+(?:\n(?![\w-]+: ).+)*)", text, re.MULTILINE)
    words = effect[1] if effect else (type(guard).__doc__ or "").partition("\n\n")[0]
    return re.sub(r"\s+", " ", words).strip().removesuffix(".")


def _where(faults: Sequence[Fault]) -> str:
    """The releases, chips and systems of several faults; empty where any of them may have it."""
    bounds = [
        (name, [getattr(each, field) for each in faults]) for name, field in (("torch", "releases"), ("macOS", "macos"))
    ]
    words = [
        f"{name} {' or '.join(f'`{each}`' for each in dict.fromkeys(all_))}"
        for name, all_ in bounds
        if all_ and all(all_)
    ]
    if faults and all(fault.chips for fault in faults):
        words.append(", ".join(dict.fromkeys(chip.removeprefix("Apple ") for fault in faults for chip in fault.chips)))
    return "; ".join(words)


def _places(issue: str) -> list[str]:
    """The sources that a guard names: addresses, #numbers of the same tracker, or a file of a library."""
    if not issue.startswith("https://") or ", #" not in issue:
        return [issue]
    first, *more = issue.split(", ")
    return [first, *(f"{first.rpartition('/')[0]}/{number.removeprefix('#')}" for number in more)]


def _link(source: str) -> str:
    """A Markdown link with a short text: pytorch#193487; a file by its name; what is no address as it is."""
    address, _, note = source.partition(" ")
    if not address.startswith("https://"):
        return source
    issue = re.fullmatch(r"https://github\.com/[\w.-]+/([\w.-]+)/(?:issues|pull)/(\d+)", address)
    text = f"{issue[1]}#{issue[2]}" if issue else address.rstrip("/").rpartition("/")[2]
    return f"[{text}]({address}){' ' if note else ''}{note}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
