"""Signs of a wrong training that need no knowledge of what is wrong, a file each: what is looked at, when it speaks.

On by default where there is Metal. `report()` lists them; `HF_MPS_SENTINELS=-name,-name` switches single ones off.
Importing this package imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_mps.guards.sentinels.base import Sentinel, SentinelNotice
    from hf_mps.guards.sentinels.registry import found, get, report, suspended

__all__ = ["Sentinel", "SentinelNotice", "found", "get", "report", "suspended"]


# Lazy, because every `import torch` with Metal comes through this package.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_mps.guards.sentinels import base, registry

    return getattr(base if name.startswith("Sentinel") else registry, name)
