"""large-pad: large tensors of five dimensions or more are padded in four, because Metal loses their values."""

from __future__ import annotations

import math
from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried

LIMIT = 2**16
"""Elements in the last dimension, or in all behind the first padded one, from which MPSGraph is wrong (PR 195147)."""
OPERATORS = (
    "constant_pad_nd",  # its own backward pass too
    *(f"{mode}_pad3d{backward}" for mode in ("reflection", "replication") for backward in ("", "_backward")),
)


def _large(first: Any, *args: Any) -> bool:
    if first.dim() < 5:
        return False
    padding = args[1] if hasattr(args[0], "shape") else args[0]
    if not 2 <= len(padding) <= 6:  # a longer one is made of copies
        return False
    # No smaller than the padded sizes, which for a backward pass and a negative padding are those given.
    sizes = [n + abs(a) + abs(b) for n, a, b in zip(first.shape[::-1], padding[::2], padding[1::2], strict=False)]
    return bool(max(sizes[0], math.prod(sizes[:-1])) >= LIMIT)


class LargePad(Tried):
    """Folds the dimensions that are not padded into one, below autograd: MPSGraph is right up to four dimensions.

    Video VAEs pad like this before each causal convolution, and frames of 256 by 256 pixels are large enough.
    """

    name = "large-pad"
    what = "F.pad of five dimensions or more loses the values of large tensors (videos, volumes), without an error"

    given = "large tensors of five dimensions"

    patches = {f"aten::{name}": Kernel("_folded", when=_large, faults=("large-pad",)) for name in OPERATORS}

    def _folded(self, stock: OriginalCall, *args: Any) -> Any:
        if not self.needed:
            self.release()
            return stock(*args)
        self.acted("large tensors of five dimensions or more are padded in four", aloud=False)
        tensors = 2 if hasattr(args[1], "shape") else 1
        kept = args[0].dim() - len(args[tensors]) // 2
        found = stock.partial(*(each.flatten(0, kept - 1) for each in args[:tensors]), *args[tensors:])
        return found.unflatten(0, args[0].shape[:kept])


def _right() -> bool:
    """Whether two frames of 65,536 ones are kept when a third of zeros is put before them."""
    import torch

    frames = torch.ones(1, 1, 2, 2**8, 2**8, device="mps")
    return int(torch.constant_pad_nd(frames, [0, 0, 0, 0, 1, 0]).sum().cpu()) == frames.numel()


GUARD = LargePad({"F.pad": _right})
