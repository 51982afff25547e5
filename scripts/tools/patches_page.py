"""The text of docs/patches.md: what `import torch` arms in other libraries; scripts/tools/docs.py writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hf_mps.core.patching import LIGHTNING, Declaration
from hf_mps.layer import integrations

ABOVE = """
`import torch` arms these {patches} patches of {targets} functions, attributes and kernels of other libraries. A library
is patched after a script imports it, and none is imported for that; guards and sentinels are armed only where there is
Metal. `HF_MPS=0` switches all off, `HF_MPS_GUARDS=-name` and `HF_MPS_SENTINELS=-name` single ones.

A patch is *around* a function and calls it, a *kernel before* that of the device `mps` (below autograd; other devices
keep theirs), *in place of* what was there, *given* where the library has none, or *registered* through the library's
own interface. A *late* one is armed when its guard has found the fault on this machine.
"""
KINDS = {
    "guard": "cures a known [hazard](hazards.md), only where the fault is",
    "sentinel": "looks for [signs](hazards.md#sentinels) of a wrong training, and changes nothing",
    "step": "lets a [step](guide-mac.md#fewer-launches) launch less; armed by `HF_MPS_FUSED_STEP=1` and by recipes",
    "device": "tells libraries whether Metal works, in place of PyTorch",
    "fallback": "gives a CPU kernel to operators that a library registers later",
    "integration": "makes libraries follow `HF_MPS_DEVICE`, and reports what fell back",
    "shim": "gives [older scripts](older-scripts.md) a name that the installed library has dropped",
}
LIBRARIES = ("torch", "aten", "transformers", "accelerate", "lightning", "datasets", "evaluate", "huggingface_hub")
TITLES = {"aten": "Operators of torch"}
WAYS = {"before the kernel of": "kernel before"}


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
        yield from _items(by_library[library])


def _library(target: str) -> str:
    """The library that a target belongs to."""
    name = target.partition(":")[0].partition(".")[0]
    return "lightning" if name.startswith("lightning") else name


def _items(patches: Iterable[Declaration]) -> Iterator[str]:
    """An item for what one part of hf_mps patches, its targets by way and module."""
    items: dict[str, dict[str, dict[str, list[str]]]] = {}
    for patch in patches:
        place, _, name = patch.target.rpartition("::" if "::" in patch.target else ":")
        ways = items.setdefault(_owner(patch), {})
        ways.setdefault(_way(patch), {}).setdefault(place, []).append(f"`{name}`")
    for owner, ways in sorted(items.items()):
        parts = (
            f"*{way}* " + "; ".join(f"`{place}`: {', '.join(dict.fromkeys(names))}" for place, names in places.items())
            for way, places in sorted(ways.items())
        )
        yield f"- {owner}, {'; '.join(parts)}"


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
