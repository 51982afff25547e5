"""conv-batch: a convolution's weight gradient is added up from parts of a batch of 65,536 or more."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel

LARGEST = 65535
"""Rows of a batch that are counted in 16 bits."""


class ConvBatch(Guard):
    """Stands before the backward passes of 1-D and 2-D convolutions, below autograd.

    Patches, frames and characters that are folded into the batch make such batches.
    """

    name = "conv-batch"
    what = "the gradient of a 1-D or 2-D convolution's weight is wrong for a batch of 65,536 or more"
    until = "pytorch#96225 is closed and the oldest supported torch has its fix"

    @property
    def patches(self) -> dict[str, str | Patch]:
        """Its kernels before the device's two; where batches are small a call costs 4 µs more."""
        names = ("mps_convolution_backward", "mps_convolution_transpose_backward")
        return {f"aten::{name}": Kernel("_in_parts", when=_large) for name in names}

    def trial(self) -> Choice[bool]:
        """Whether the gradient of a weight is the sum over 65,536 rows."""
        import torch

        rows, weight = (torch.ones(count, 1, 1, 1, device="mps") for count in (LARGEST + 1, 1))
        how = (0, 0), (1, 1), (1, 1), 1, [False, True, False]
        with self.left_alone():
            found = float(torch.ops.aten.mps_convolution_backward(rows, rows, weight, *how)[1].cpu())
        if found == LARGEST + 1:
            return Choice(False, "tried on the device: a weight's gradient is right for a batch of 65,536")
        return Choice(True, f"tried on the device: a sum over a batch of 65,536 ones is {found:g}")

    def _in_parts(self, stock: OriginalCall, rows: Any, grad: Any, weight: Any, *rest: Any) -> Any:
        import torch

        *how, mask = rest
        if not mask[1] or not self.needed:
            return stock(rows, grad, weight, *how, mask)
        self.acted(f"a convolution's weight gradient over more than {LARGEST:,} rows is added up in parts", aloud=False)
        others = [mask[0], False, *mask[2:]]
        found = list(stock.partial(rows, grad, weight, *how, others)) if any(others) else [None] * len(mask)
        total: Any = None
        for start in range(0, rows.shape[0], LARGEST):
            here = slice(start, start + LARGEST)
            part = stock.partial(rows[here], grad[here], weight, *how, [False, True, *(False for _ in mask[2:])])[1]
            wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
            total = wide if total is None else total.add_(wide)
        found[1] = total.to(weight.dtype)
        return tuple(found)


def _large(rows: Any, *_: Any) -> bool:
    return bool(rows.shape[0] > LARGEST and rows.dim() == 4)


GUARD = ConvBatch()
