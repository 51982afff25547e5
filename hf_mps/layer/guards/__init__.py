"""Known hazards of training on Metal: what each is, where it is reported, and what is done about it.

`report()` lists them, and the sentinels; `HF_MPS_GUARDS=-name,-name` switches single ones off. Importing this package
imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_mps.core.notices import GuardNotice, SentinelNotice
    from hf_mps.layer.guards.base import Guard
    from hf_mps.layer.guards.sentinels.base import Sentinel
    from hf_mps.layer.guards.states import acted, found, get, report, start, suspended

__all__ = [
    "Guard",
    "GuardNotice",
    "Sentinel",
    "SentinelNotice",
    "acted",
    "found",
    "get",
    "report",
    "start",
    "suspended",
]


# Lazy, because every `import torch` comes through this package.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    homes = {"Guard": f"{__name__}.base", "Sentinel": f"{__name__}.sentinels.base"}
    homes |= dict.fromkeys(("GuardNotice", "SentinelNotice"), "hf_mps.core.notices")
    return getattr(import_module(homes.get(name, f"{__name__}.states")), name)
