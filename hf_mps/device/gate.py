"""torch.backends.mps.is_available answers with the probe's verdict: the one question that every library asks.

PyTorch says True wherever macOS lists a Metal device, also in virtual machines where each allocation fails
(actions/runner-images#9918), and it has no switch. transformers, Accelerate, Lightning and plain scripts all take Metal
on this word alone. It can go when PyTorch tries the device before it says so.
"""

from __future__ import annotations

import functools

REASON = "answers with HF_MPS_DEVICE and, in virtual machines, with a real probe; PyTorch's own is True where all fails"


def install() -> None:
    """Put the verdict in place of PyTorch's answer; once. Imports torch, asks nothing of the device yet."""
    import torch

    stock = torch.backends.mps.is_available
    if getattr(stock, "hf_mps", False):
        return

    # `wraps` keeps the name, the docstring and the cache methods that callers of the stock function may use.
    @functools.wraps(stock)
    def is_available() -> bool:
        from hf_mps.device.choice import metal

        return metal().value

    for name in ("cache_clear", "cache_info"):
        setattr(is_available, name, getattr(stock, name, None))
    is_available.hf_mps = True  # type: ignore[attr-defined]
    torch.backends.mps.is_available = is_available  # type: ignore[assignment]
