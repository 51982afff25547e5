"""conv3d-layout: 3-D convolutions read volumes whose channels lie last, where Metal misreads the others."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel

OPERATORS = {"_mps_convolution": 0, "mps_convolution_transpose_backward": 1}
"""Operator -> which argument the convolution reads; the second one is the gradient of a transposed convolution."""


class Conv3dLayout(Guard):
    """Stands before 3-D convolutions on macOS 26.0 to 26.2, whose primitives misread; 26.3 and 26.7 are right.

    Volumes in channels_last_3d are convolved by other kernels, which are right (pytorch#197114). Patch embeddings of
    video and Qwen-VL models, and VAEs of videos, are such convolutions.
    """

    name = "conv3d-layout"
    what = "3-D convolutions give other values without an error on macOS 26.0 to 26.2"
    until = "macOS 26.2 is out of use"

    @property
    def patches(self) -> dict[str, str | Patch]:
        """Its kernels before the device's."""
        return {f"aten::{name}": Kernel("_channels_last", reads, when=_volumes) for name, reads in OPERATORS.items()}

    def __init__(self) -> None:
        super().__init__()
        self._helps = True

    def trial(self) -> Choice[bool]:
        """Whether a small convolution differs from the CPU's, and whether one of channels_last_3d does."""
        import torch

        with self.left_alone():
            right, self._helps = _right(torch.contiguous_format), _right(torch.channels_last_3d)
        if right:
            return Choice(False, "tried on the device: 3-D convolutions are right")
        if not self._helps:
            return Choice(True, "tried on the device: 3-D convolutions are wrong, those of channels_last_3d too")
        return Choice(True, "tried on the device: 3-D convolutions are wrong, those of channels_last_3d are right")

    def _channels_last(self, reads: int, stock: OriginalCall, *args: Any) -> Any:
        import torch

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


def _volumes(*args: Any) -> bool:
    return bool(args[0].dim() == 5)


def _right(layout: Any) -> bool:
    """Whether 3 x 3 x 3 convolutions of 4 and of 8 channels are the CPU's, of volumes in this layout."""
    import torch

    for channels in (4, 8):
        count = torch.arange(channels * 8**3, dtype=torch.float32, device="cpu")
        volume = count.remainder(11).sub(5).view(1, channels, 8, 8, 8)
        weight = count[: channels * channels * 27].remainder(7).sub(3).view(channels, channels, 3, 3, 3)
        right = torch.conv3d(volume, weight, padding=1)
        there = volume.to("mps").contiguous(memory_format=layout)
        if not torch.allclose(torch.conv3d(there, weight.to("mps"), padding=1).cpu(), right, rtol=1e-3, atol=1e-2):
            return False
    return True


GUARD = Conv3dLayout()
