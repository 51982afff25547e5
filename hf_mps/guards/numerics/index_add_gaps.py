"""index-add-gaps: sums by index_add_ reach transposed tensors and slices on macOS 14, where Metal loses them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.stock import Stock
from hf_mps.device import machine
from hf_mps.guards import kernel_overrides
from hf_mps.guards.base import Guard
from hf_mps.guards.introspect import torch_release
from hf_mps.guards.kernel_overrides import Kernel

FIXED = (2, 14)
"""The release whose index_add is a kernel of PyTorch's own, which writes by strides (Indexing.mm)."""


def _lost(given: Any, *_: Any, **__: Any) -> bool:
    return not given.is_contiguous() or given.storage_offset() != 0


class IndexAddGaps(Guard):
    """Adds to a contiguous copy, which is then copied back, below autograd.

    Before macOS 15 MPSGraph's result goes to a temporary buffer where the tensor that it is for has gaps or an offset,
    and nothing copies it back.
    """

    name = "index-add-gaps"
    what = "index_add_ leaves transposed tensors and slices as they were on macOS 14, without an error"
    issue = "https://github.com/pytorch/pytorch/issues/176159"
    until = "the oldest supported torch is 2.14"
    releases = "<2.14"
    cures = ">=2.9"

    patches = {"aten::index_add_": Kernel("_copied_back", when=_lost)}

    def applies(self) -> Choice[bool]:
        """Whether a transposed tensor stays as it was."""
        import torch

        sums, index = torch.zeros(2, 3, device="mps").t(), torch.zeros(1, dtype=torch.long, device="mps")
        with self.left_alone():
            sums.index_add_(0, index, torch.ones(1, 2, device="mps"))
        if int(sums.sum().cpu()) == 2:
            return Choice(False, "tried on the device: index_add_ reaches a transposed tensor")
        return Choice(True, "tried on the device: index_add_ leaves a transposed tensor as it was")

    def concerns(self, module: ModuleType) -> bool:
        """Whether this system and release may have the fault, and torch gives the kernels out."""
        may = torch_release() < FIXED and not machine.present().macos_at_least(15)
        return may and kernel_overrides.given_out().value

    def _copied_back(self, stock: Stock, given: Any, *args: Any, **named: Any) -> Any:
        import torch

        if not self.needed:
            return stock(given, *args, **named)
        self.acted("index_add_ adds to copies of tensors with gaps or an offset, which are copied back", aloud=False)
        return given.copy_(stock.part(given.clone(memory_format=torch.contiguous_format), *args, **named))


GUARD = IndexAddGaps()
