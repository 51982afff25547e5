"""Known hazards of training on Metal: what each is, where it is reported, and what is done about it.

`report()` lists them, and the sentinels; `HF_MPS_GUARDS=-name,-name` switches single ones off. Importing this package
imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_mps.core.notices import GuardNotice, SentinelNotice
    from hf_mps.layer.guards.states import acted, found, get, report, start, suspended

__all__ = ["GuardNotice", "SentinelNotice", "acted", "found", "get", "report", "start", "suspended"]


# Lazy, because every `import torch` comes through this package.
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    home = "hf_mps.core.notices" if name.endswith("Notice") else f"{__name__}.states"
    return getattr(import_module(home), name)
