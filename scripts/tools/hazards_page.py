"""The text of docs/hazards.md: from what guards, sentinels, the doctor and the simulated device say of each hazard.

scripts/tools/docs.py writes it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from packaging.version import Version

from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.catalogue import REGISTRY, SENTINELS
from hf_mps.metal.device.faults import FAULTS, SIMULATED, Fault

# A guard's folder -> the heading and the sentence above its guards, in the order of the page.
GROUPS = {
    "numerics": ("Wrong numbers", "Metal's kernels compute something else than the CPU, mostly without an error."),
    "resume": ("Resume", "A run that was stopped goes on as another one than it would have been."),
    "platform": ("Platform", "What a Mac, its memory or a library on it does not have, or does otherwise."),
}
SUM = """
{guards} guards stand against known hazards of training on Metal, and {sentinels} sentinels look for signs of unknown
ones. Each guard acts only on the chips, systems and releases that have its fault, and only on tensors of the device
`mps`. `python -c "import hf_mps; print(hf_mps.guards.report())"` says which are on here and what they did;
`hf-mps doctor --trials` tries the device for every fault that a guard knows.
"""
FAULTS_ABOVE = """
What the profile's Mac has with the installed torch is on from the start; `HF_MPS_FAULTS=-name,-name` leaves single ones
out. [The simulated device](simulator.md#faults-by-name) says more.
"""


def lines() -> Iterator[str]:
    """The lines of the page behind its title."""
    guards = REGISTRY.each("guard")
    yield SUM.strip().format(guards=len(guards), sentinels=len(SENTINELS.names))
    for folder, (title, sentence) in GROUPS.items():
        inside = [guard for guard in guards if type(guard).__module__.split(".")[-2] == folder]
        yield from ("", f"## {title}", "", sentence)
        for guard in inside:
            yield from _guard(guard)
    yield from ("", "## Sentinels", "", "A sentinel looks at every training on the device, whatever its loop.", "")
    yield from _table(("sentinel", "looks for", "what it does then"), map(_sentinel, SENTINELS.names))
    yield from ("", "`HF_MPS_SENTINELS=-name,-name` switches single ones off.")
    yield from ("", "## Known problems that no guard cures", "")
    yield from ("`hf-mps doctor` names those of the installed versions.", "")
    heads = ("versions", "chips", "macOS", "what is wrong", "source")
    yield from _table(
        ("package", *heads), (_problem(fault) for fault in FAULTS.values() if not fault.guard and fault.listed)
    )
    yield from ("", "## Faults of the simulated device", "", FAULTS_ABOVE.strip(), "")
    yield from _table(("fault", *heads), (_fault(name, FAULTS[name]) for name in SIMULATED))


def _sentinel(name: str) -> tuple[str, ...]:
    sentinel = REGISTRY.get(name)
    return f"`{name}`", sentinel.what, sentinel.why


def _problem(fault: Fault) -> tuple[str, ...]:
    return fault.package, *_extent(fault.releases, fault.chips, fault.macos), fault.what, _link(fault.issue)


def _fault(name: str, fault: Fault) -> tuple[str, ...]:
    return f"`{name}`", *_extent(fault.releases, fault.chips, fault.macos), fault.what, _link(fault.issue)


def _extent(versions: str, chips: Sequence[str], macos: str) -> tuple[str, str, str]:
    return _bounds([versions]), _chips(chips), _bounds([macos])


def _guard(guard: Guard) -> Iterator[str]:
    cured = {name: FAULTS[name] for name in guard.faults}
    simulated = [name for name, fault in FAULTS.items() if fault.simulated and name in (*cured, guard.name)]
    yield from ("", f"### {guard.name}", "", f"**Hazard:** {guard.what}.", "", f"**Guard:** {_words(guard)}", "")
    rows = [("source", ", ".join(map(_link, _places(guard.issue))))]
    rows += [("torch", _bounds([fault.releases for fault in cured.values()]))]
    everywhere = not all(fault.chips for fault in cured.values())
    rows += [("chips", _chips([] if everywhere else [chip for fault in cured.values() for chip in fault.chips]))]
    rows += [("macOS", _bounds([fault.macos for fault in cured.values()]))]
    rows += [("what to do", _advice(guard)), ("can go when", guard.until), ("off", f"`HF_MPS_GUARDS=-{guard.name}`")]
    if simulated:
        rows.append(("simulated as", ", ".join(f"`{name}`" for name in simulated)))
    yield from _table(("", ""), rows)


def _words(guard: Guard) -> str:
    """What the script gets, from the docstring of a guard's file, and how, from that of its class; on one line."""
    text = sys.modules[type(guard).__module__].__doc__ or ""
    effect = re.search(rf"^{guard.name}: (.+(?:\n(?![\w-]+: ).+)*)", text, re.MULTILINE)
    words = re.sub(r"\s+", " ", f"{effect[1] if effect else ''} {type(guard).__doc__ or ''}").strip()
    return words[:1].upper() + words[1:]


def _bounds(bounds: Sequence[str]) -> str:
    """The releases, or systems, of several faults."""
    return ", or ".join(f"`{each}`" for each in dict.fromkeys(bounds)) if bounds and all(bounds) else "all"


def _chips(chips: Sequence[str]) -> str:
    named = dict.fromkeys(chip.removeprefix("Apple ") for chip in chips)
    return ", ".join(named) or "all"


def _advice(guard: Guard) -> str:
    """What a person does about it, by the releases that have the fault."""
    first = "what its line says" if "refused" in _words(guard) else "nothing"
    bounds = [FAULTS[name].releases for name in guard.faults]
    if bounds and all(bound.startswith("<") for bound in bounds):
        newest = max((bound.removeprefix("<") for bound in bounds), key=Version)
        return f"{first}; torch {newest} and later need no guard"
    return f"{first}; a line says so where a person has to do something" if first == "nothing" else first


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
