"""Guards of convolutions.

conv-batch: a convolution's weight gradient is added up from parts of a large batch.
conv3d-layout: 3-D convolutions read volumes in channels_last.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_mps.core.choice import Choice
from hf_mps.core.patching import OriginalCall
from hf_mps.layer.guards.base import Guard, tried
from hf_mps.layer.guards.kernel_overrides import Kernel

LARGEST = 65535
"""Rows of a batch that are counted in 16 bits."""


def _large(rows: Any, *others: Any) -> bool:
    """Whether the weight's gradient, of those that the last argument asks for, is a sum over a large batch."""
    return bool(rows.shape[0] > LARGEST and rows.dim() == 4 and others[-1][1])


class ConvBatch(Guard):
    """Stands before the backward passes of 1-D and 2-D convolutions, below autograd.

    Patches, frames and characters that are folded into the batch make such batches.
    """

    name = "conv-batch"
    what = "the gradient of a 1-D or 2-D convolution's weight is wrong for a batch of 65,536 or more"
    until = "pytorch#96225 is closed and the oldest supported torch has its fix"

    # Where batches are small a call costs 4 µs more.
    says = f"a convolution's weight gradient over more than {LARGEST:,} rows is added up in parts"
    patches = dict.fromkeys(
        ("aten::mps_convolution_backward", "aten::mps_convolution_transpose_backward"),
        Kernel("_in_parts", when=_large, says=says),
    )

    def trial(self) -> Choice[bool]:
        """Return whether the gradient of a weight is the sum over 65,536 rows."""
        rows, weight = (torch.ones(count, 1, 1, 1, device="mps") for count in (LARGEST + 1, 1))
        how = (0, 0), (1, 1), (1, 1), 1, [False, True, False]
        with self.left_alone():
            found = float(torch.ops.aten.mps_convolution_backward(rows, rows, weight, *how)[1].cpu())
        right = "a weight's gradient is right for a batch of 65,536"
        return tried(found != LARGEST + 1, f"a sum over a batch of 65,536 ones is {found:g}", right)

    def _in_parts(self, stock: OriginalCall, rows: Any, grad: Any, weight: Any, *rest: Any) -> Any:
        *how, mask = rest
        others = [mask[0], False, *mask[2:]]
        found = list(stock.partial(rows, grad, weight, *how, others)) if any(others) else [None] * len(mask)
        total: Any = None
        for start in range(0, rows.shape[0], LARGEST):
            here = slice(start, start + LARGEST)
            part = stock.partial(rows[here], grad[here], weight, *how, [False, True, *(False for _ in mask[2:])])[1]
            # In half precision each addition would round the sum so far.
            wide = part.float() if part.dtype in (torch.float16, torch.bfloat16) else part
            total = wide if total is None else total.add_(wide)
        found[1] = total.to(weight.dtype)
        return tuple(found)


OPERATORS = {"_mps_convolution": 0, "mps_convolution_transpose_backward": 1}
"""Operator -> which argument the convolution reads; the second one is the gradient of a transposed convolution."""


def _volumes(*args: Any) -> bool:
    return bool(args[0].dim() == 5)


class Conv3dLayout(Guard):
    """Stands before 3-D convolutions on macOS 26.0 to 26.2, whose primitives misread; 26.3 and 26.7 are right.

    Volumes in channels_last_3d are convolved by other kernels, which are right (pytorch#197114). Patch embeddings of
    video and Qwen-VL models, and VAEs of videos, are such convolutions.
    """

    name = "conv3d-layout"
    what = "3-D convolutions give other values without an error on macOS 26.0 to 26.2"
    until = "macOS 26.2 is out of use"

    patches = {f"aten::{name}": Kernel("_channels_last", reads, when=_volumes) for name, reads in OPERATORS.items()}

    _helps = True

    def trial(self) -> Choice[bool]:
        """Return whether a small convolution differs from the CPU's, and whether one of channels_last_3d does."""
        with self.left_alone():
            right, self._helps = _right(torch.contiguous_format), _right(torch.channels_last_3d)
        others = f"those of channels_last_3d {'are right' if self._helps else 'too'}"
        return tried(not right, f"3-D convolutions are wrong, {others}", "3-D convolutions are right")

    def _channels_last(self, reads: int, stock: OriginalCall, *args: Any) -> Any:
        given, last = args[reads], torch.channels_last_3d
        if given.is_contiguous(memory_format=last) or not self.needed:
            return stock(*args)
        if not self._helps:
            self.acted("3-D convolutions are wrong on this macOS; next: update to macOS 26.3 or later")
            return stock(*args)
        self.acted("volumes are laid out with their channels last for 3-D convolutions", aloud=False)
        found = stock.partial(*args[:reads], given.contiguous(memory_format=last), *args[reads + 1 :])
        if args[1 - reads].is_contiguous():  # as it lies where the layout of none was changed
            first = found if torch.is_tensor(found) else found[0]
            first = first if first is None else first.contiguous()
            found = first if torch.is_tensor(found) else (first, *found[1:])
        return found


def _right(layout: Any) -> bool:
    """Return whether 3 x 3 x 3 convolutions of 4 and of 8 channels are the CPU's, of volumes in this layout."""
    for channels in (4, 8):
        count = torch.arange(channels * 8**3, dtype=torch.float32, device="cpu")
        volume = count.remainder(11).sub(5).view(1, channels, 8, 8, 8)
        weight = count[: channels * channels * 27].remainder(7).sub(3).view(channels, channels, 3, 3, 3)
        right = torch.conv3d(volume, weight, padding=1)
        there = volume.to("mps").contiguous(memory_format=layout)
        if not torch.allclose(torch.conv3d(there, weight.to("mps"), padding=1).cpu(), right, rtol=1e-3, atol=1e-2):
            return False
    return True
