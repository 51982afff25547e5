"""lerp-weight: the weight of torch.lerp may be one number of another dtype, which Metal misreads."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.stock import Stock
from hf_mps.guards.base import Guard
from hf_mps.guards.introspect import torch_release
from hf_mps.guards.kernel_overrides import Kernel

FIXED = (2, 15)
"""PR 196662; the wheel of 2.14.1 still binds the weight in its own dtype."""
FIRST = (2, 12)
"""The release whose lerp is a kernel of PyTorch's own (#177093)."""


def _misread(given: Any, end: Any, weight: Any) -> bool:
    # A number within a larger CPU tensor is read at that tensor's beginning (pytorch#187117).
    within = weight.device.type == "cpu" and weight.storage_offset() != 0
    return bool(weight.dim() == 0 and (weight.dtype != given.dtype or within))


class LerpWeight(Guard):
    """Hands such a weight on as a Python number, or in the tensors' dtype where it lies on the device.

    Optimizers that keep their betas in tensors, as nanochat's do, update a state in half precision like this.
    """

    name = "lerp-weight"
    what = "torch.lerp misreads a weight that is one number in a tensor of another dtype, without an error"
    issue = "https://github.com/pytorch/pytorch/issues/196067"
    until = "the oldest supported torch is 2.15"
    releases = ">=2.12,<2.15"

    patches = {f"aten::{name}.Tensor": Kernel("_of_one_dtype", name, when=_misread) for name in ("lerp", "lerp_")}

    def applies(self) -> Choice[bool]:
        """Whether this release has the fault; a trial would abort where `lerp` is MPSGraph's still."""
        import torch

        if self.concerns(torch):
            return Choice(
                True, f"torch {torch.__version__} binds the weight in its own dtype, 2.15 in that of the tensors"
            )
        return Choice(False, f"torch {torch.__version__} has the fix of pytorch#196067, or another kernel")

    def concerns(self, module: ModuleType) -> bool:
        """Whether this release has the fault."""
        return FIRST <= torch_release() < FIXED

    def _of_one_dtype(self, name: str, stock: Stock, given: Any, end: Any, weight: Any) -> Any:
        import torch

        if not self.needed:
            return stock(given, end, weight)
        self.acted("lerp is given weights of another dtype in the dtype of its tensors", aloud=False)
        weight = weight.item() if weight.device.type == "cpu" else weight.to(given.dtype)
        return stock.theirs(getattr(torch.ops.aten, name), given, end, weight)


GUARD = LerpWeight()
