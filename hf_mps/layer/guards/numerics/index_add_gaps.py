"""index-add-gaps: sums by index_add_ reach transposed tensors and slices on macOS 14, where Metal loses them."""

from __future__ import annotations

from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried


def _lost(given: Any, *_: Any, **__: Any) -> bool:
    return not given.is_contiguous() or given.storage_offset() != 0


class IndexAddGaps(Tried):
    """Adds to a contiguous copy, which is then copied back, below autograd.

    Before macOS 15 MPSGraph's result goes to a temporary buffer where the tensor that it is for has gaps or an offset,
    and nothing copies it back.
    """

    name = "index-add-gaps"
    what = "index_add_ leaves transposed tensors and slices as they were on macOS 14, without an error"

    given = "transposed tensors"

    patches = {"aten::index_add_": Kernel("_copied_back", when=_lost, faults=("index-add-gaps",))}

    def _copied_back(self, stock: OriginalCall, given: Any, *args: Any, **named: Any) -> Any:
        import torch

        if not self.needed:
            self.release()
            return stock(given, *args, **named)
        self.acted("index_add_ adds to copies of tensors with gaps or an offset, which are copied back", aloud=False)
        return given.copy_(stock.partial(given.clone(memory_format=torch.contiguous_format), *args, **named))


def _right() -> bool:
    """Whether it adds to a transposed tensor."""
    import torch

    sums, index = torch.zeros(2, 3, device="mps").t(), torch.zeros(1, dtype=torch.long, device="mps")
    sums.index_add_(0, index, torch.ones(1, 2, device="mps"))
    return int(sums.sum().cpu()) == 2


GUARD = IndexAddGaps({"index_add_": _right})
