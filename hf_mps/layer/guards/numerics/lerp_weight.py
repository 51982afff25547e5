"""lerp-weight: the weight of torch.lerp may be one number of another dtype, which Metal misreads."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel


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

    patches = {
        f"aten::{name}.Tensor": Kernel("_of_one_dtype", name, when=_misread, faults=("lerp-weight",))
        for name in ("lerp", "lerp_")
    }

    def trial(self) -> Choice[bool]:
        """Whether half of the way from 0 to 1 in float16 is 0.5 by a weight of float32."""
        import torch

        ends = torch.arange(2.0, dtype=torch.float16, device="mps")
        with self.left_alone():
            found = float(torch.lerp(ends[0], ends[1], torch.tensor(0.5, device="mps")).cpu())
        if found == 0.5:
            return Choice(False, "tried on the device: lerp reads a weight of another dtype rightly")
        return Choice(True, f"tried on the device: lerp reads 0.5 of another dtype as {found:g}")

    def _of_one_dtype(self, name: str, stock: OriginalCall, given: Any, end: Any, weight: Any) -> Any:
        import torch

        if not self.needed:
            return stock(given, end, weight)
        self.acted("lerp is given weights of another dtype in the dtype of its tensors", aloud=False)
        weight = weight.item() if weight.device.type == "cpu" else weight.to(given.dtype)
        return stock.foreign(getattr(torch.ops.aten, name), given, end, weight)


GUARD = LerpWeight()
