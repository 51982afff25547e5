"""linear-bias: a linear layer adds its bias in a step of its own where the device's fused kernel loses it."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel

MATRICES = 65536
"""From the next one on the fused kernel's counter of 16 bits begins again (pytorch#189495)."""


class LinearBias(Guard):
    """Puts a kernel before the device's `linear`, below autograd, on the releases that have one of the two faults."""

    name = "linear-bias"
    what = (
        "a linear layer forgets its bias for a single row (M1 with macOS 26), and writes over rows where its input has "
        "more than 65,536 matrices"
    )
    # A call costs 2.5 µs more.
    patches = {"aten::linear": Kernel("_linear")}

    def __init__(self) -> None:
        super().__init__()
        self._single = self._many = False  # what the trials found

    def trial(self) -> Choice[bool]:
        """Whether a linear layer's bias is wrong for one row, or for more matrices than a counter of 16 bits counts."""
        with self.left_alone():
            self._single, self._many = not _right_for_a_row(), not _right_for_many()
        wrong = ["one row"] * self._single + [f"{MATRICES + 1:,} matrices"] * self._many
        if wrong:
            return Choice(True, f"tried on the device: the bias is wrong for {' and for '.join(wrong)}")
        return Choice(False, f"tried on the device: the bias is right for one row and for {MATRICES + 1:,} matrices")

    def _linear(self, stock: OriginalCall, rows: Any, weight: Any, bias: Any = None) -> Any:
        shape = rows.shape
        single, many = len(shape) < 2 or shape[-2] == 1, len(shape) > 2 and shape[-3] > MATRICES
        if bias is None or not (single or many) or not self.needed:
            return stock(rows, weight, bias)
        if not ((single and self._single) or (many and self._many)):
            return stock(rows, weight, bias)
        self.acted("linear layers add their bias in a step of its own where Metal's kernel loses it", aloud=False)
        return stock.partial(rows, weight, None) + bias


def _right_for_a_row() -> bool:
    import torch

    given = (torch.ones(1, 8), torch.zeros(4, 8), torch.ones(4))
    found = torch.nn.functional.linear(*(each.to("mps") for each in given))
    return torch.equal(found.cpu(), torch.ones(1, 4))


def _right_for_many() -> bool:
    """Whether the last of 65,537 matrices of two rows is not written over the first."""
    import torch

    rows = torch.arange(MATRICES + 1.0).view(-1, 1, 1).expand(-1, 2, 1).contiguous()
    one = torch.ones(1, device="mps")
    return float(torch.nn.functional.linear(rows.to("mps"), one.view(1, 1), one)[0, 0, 0].cpu()) == 1.0


GUARD = LinearBias()
