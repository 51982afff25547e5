"""Known hazards of training on Metal, a file each: what it is, where it is reported, what is done about it.

`report()` lists them; `HF_MPS_GUARDS=-name,-name` switches single ones off. Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_mps.core.notices import GuardNotice

if TYPE_CHECKING:
    from hf_mps.guards.base import Guard
    from hf_mps.guards.registry import acted, get, install, report, start, suspended

__all__ = ["Guard", "GuardNotice", "acted", "get", "install", "report", "start", "suspended"]


# Lazy, because every `import torch` with Metal comes through this package.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_mps.guards import base, registry

    return getattr(base if name == "Guard" else registry, name)
