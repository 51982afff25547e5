"""The text of docs/patches.md: what `import torch` arms in other libraries; scripts/tools/docs.py writes it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hf_mps.core.patching import LIGHTNING, Declaration
from hf_mps.layer import integrations

ABOVE = """
What hf_mps changes in other libraries, once `import torch` has switched it on: {patches} patches of {targets}
functions, attributes and kernels, each declared where it is written. A library is patched after it was imported, and
none is imported for that; guards and sentinels are armed only where there is Metal. `HF_MPS=0` leaves all of it out,
`HF_MPS_GUARDS=-name` and `HF_MPS_SENTINELS=-name` single ones.

A patch is *around* a function and calls it, a *kernel before* that of the device `mps` (below autograd; other devices
keep theirs), *in place of* what was there, *given* where the library has none, or *registered* as the library offers.
One marked *late* is armed when its guard has found the fault on this machine.
"""
KINDS = {
    "guard": "stands against a known [hazard](hazards.md), and acts only where the fault is",
    "sentinel": "looks for [signs](hazards.md#sentinels) of a wrong training, and changes nothing",
    "step": "lets a [step](guide-mac.md#fewer-launches) launch less; armed by `HF_MPS_FUSED_STEP=1` and by recipes",
    "device": "answers for PyTorch whether Metal is there, which every library asks",
    "fallback": "gives operators that a library registers later a kernel, too",
    "integration": "makes libraries follow `HF_MPS_DEVICE`, and tells what fell back",
    "shim": "gives [older scripts](older-scripts.md) a name back, where the installed library has it no more",
}
LIBRARIES = ("torch", "aten", "transformers", "accelerate", "lightning", "datasets", "evaluate", "huggingface_hub")
TITLES = {"aten": "Operators of torch"}
WAYS = {"before the kernel of": "kernel before"}
FEW = 3
"""Names given to one class that still have a row each."""


def lines() -> Iterator[str]:
    """The lines of the page behind its title."""
    # Lightning comes as two packages; what is patched in the second is what is patched in the first.
    patches = [each for each in integrations.declared() if not each.target.startswith(f"{LIGHTNING[1]}.")]
    yield ABOVE.strip().format(patches=len(patches), targets=len({each.target for each in patches}))
    yield ""
    kinds = {kind: [each for each in patches if each.kind == kind] for kind in KINDS}
    assert sum(map(len, kinds.values())) == len(patches), "a kind of patch that the page does not know"
    yield from _table(("by a", "patches", "which"), ((kind, str(len(kinds[kind])), KINDS[kind]) for kind in KINDS))
    by_library: dict[str, list[Declaration]] = {}
    for patch in sorted(patches, key=lambda each: each.target):
        by_library.setdefault(_library(patch.target), []).append(patch)
    for library in (*LIBRARIES, *sorted(set(by_library) - set(LIBRARIES))):
        yield from ("", f"## {TITLES.get(library, library)}", "")
        if library == "lightning":
            yield from (f"In `{LIGHTNING[1]}` as in `{LIGHTNING[0]}`.", "")
        yield from _table(("what", "how", "by"), _rows(by_library[library]))


def _library(target: str) -> str:
    """The library that a target belongs to."""
    name = target.partition(":")[0].partition(".")[0]
    return "lightning" if name.startswith("lightning") else name


def _rows(patches: Iterable[Declaration]) -> Iterator[tuple[str, str, str]]:
    """A row for each target, with those who patch it from the innermost out; many names of one class share a row."""
    owners: dict[str, list[Declaration]] = {}
    given: dict[tuple[str, str], list[str]] = {}
    for patch in patches:
        if patch.way == "given":
            place, name = re.split(r"(?<=[.:])(?=\w+$)", patch.target)
            given.setdefault((place, _owner(patch)), []).append(name)
        else:
            owners.setdefault(patch.target, []).append(patch)
    for target, those in owners.items():
        yield f"`{target}`", ", ".join(dict.fromkeys(map(_way, those))), ", ".join(dict.fromkeys(map(_owner, those)))
    for (place, owner), names in given.items():
        if len(names) > FEW:
            yield f"`{place[:-1]}`: {', '.join(f'`{name}`' for name in names)}", "given", owner
        else:
            yield from ((f"`{place}{name}`", "given", owner) for name in names)


def _way(patch: Declaration) -> str:
    return WAYS.get(patch.way, patch.way) + (", late" if patch.late else "")


def _owner(patch: Declaration) -> str:
    """Who patches; a guard with a link to what is said of it."""
    if patch.kind == "guard":
        return f"[{patch.name}](hazards.md#{patch.name})"
    return f"{patch.kind} {patch.name}"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"
