"""Which device a run takes, and everything that is known about it. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_mps.metal.device.choice import choose, cuda, metal, simulated, switch

__all__ = ["choose", "cuda", "metal", "simulated", "switch"]


# Lazy, because every `import torch` in the environment comes through this package (autoload, availability).
def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_mps.metal.device import choice

    return getattr(choice, name)
