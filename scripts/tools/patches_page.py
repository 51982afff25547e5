"""The text of docs/patches.md: what `import torch` arms in other libraries; scripts/tools/docs.py writes it."""

from __future__ import annotations

from collections.abc import Iterator

from hf_mps import integrations
from hf_mps.core.patching import Declaration

ABOVE = """
What hf_mps changes in other libraries, once `import torch` has switched it on: every function that it stands around,
every kernel that it stands before, and every name that it gives back to a module. A library is patched after it was
imported, and none is imported for that; guards and sentinels are armed where there is Metal alone. `HF_MPS=0` leaves
all of it out. [Hazards](hazards.md) says what each guard is for.
"""
KINDS = {
    "device": ("Whether Metal is there", "PyTorch's own answers, which every library asks for."),
    "fallback": ("The fallback", "Operators that a library registers later get a kernel too."),
    "integration": ("The one switch", "Libraries follow HF_MPS_DEVICE and tell what fell back."),
    "guard": ("Guards", "Each acts only where the fault is; one marked *late* is armed when its guard finds that."),
    "sentinel": ("Sentinels", "They look, and change nothing."),
    "shim": ("Names of older scripts", "Each is left out where the installed library still has the name."),
}
WAYS = {"before the kernel of": "kernel before"}


def lines() -> Iterator[str]:
    """The lines of the page behind its title."""
    declared = integrations.declared()
    yield ABOVE.strip()
    for kind, (title, sentence) in KINDS.items():
        yield from ("", f"## {title}", "", sentence, "", "| by | what is done | to |", "| --- | --- | --- |")
        yield from _rows([each for each in declared if each.kind == kind])


def _rows(declared: list[Declaration]) -> Iterator[str]:
    """A row for each of a kind and way, with its targets."""
    targets: dict[tuple[str, str], list[str]] = {}
    for each in declared:
        way = WAYS.get(each.way, each.way) + (", late" if each.late else "")
        targets.setdefault((each.name, way), []).append(f"`{each.target}`")
    for (name, way), found in targets.items():
        yield f"| {name} | {way} | {', '.join(found)} |"
