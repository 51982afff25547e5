"""The text of docs/patches.md: what `import torch` arms in other libraries; scripts/tools/docs.py writes it."""

from __future__ import annotations

from collections.abc import Iterator

from hf_mps.guards import catalogue as guards
from hf_mps.guards.sentinels import catalogue as sentinels
from hf_mps.integrations import ROOMS

ABOVE = """
What hf_mps wraps in other libraries, once `import torch` has switched it on. A library is patched after it was
imported, and none is imported for that. `HF_MPS=0` leaves all of it out. [Hazards](hazards.md) says what each guard is
for.
"""


def lines() -> Iterator[str]:
    """The lines of the page behind its title."""
    yield ABOVE.strip()
    yield ""
    yield "| module | guards | sentinels | others |"
    yield "| --- | --- | --- | --- |"
    for module in dict.fromkeys((*guards.INSTALLED_AFTER, *sentinels.INSTALLED_AFTER, *ROOMS)):
        others = [room for room in ROOMS.get(module, ()) if room not in ("guards", "sentinels")]
        cells = (guards.INSTALLED_AFTER.get(module, ()), sentinels.INSTALLED_AFTER.get(module, ()), others)
        yield f"| `{module}` | {' | '.join(', '.join(names) for names in cells)} |"
