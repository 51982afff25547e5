"""half-unscale: GradScaler unscales half-precision gradients in float32, where Metal's kernel zeroes them."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.stock import Stock
from hf_mps.guards.base import Guard

OPERATOR = "_amp_foreach_non_finite_check_and_unscale_"


class HalfUnscale(Guard):
    """Stands around the function that GradScaler calls, in torch's namespace: torch 2.8 gives no kernel out.

    Metal's kernel declares the factor in the gradients' dtype and is given a float32, of which it reads two bytes:
    zero for every power of two, as scales are. Such gradients come of half-precision parameters alone; autocast keeps
    those of float32 parameters in float32.
    """

    name = "half-unscale"
    what = "GradScaler sets the gradients of float16 and bfloat16 parameters to zero, so that nothing is learned"
    issue = "https://github.com/pytorch/pytorch/pull/184286"
    until = "the oldest supported torch is 2.13"
    releases = "<2.13"
    # Torch's function, which runs once a step for each dtype.
    patches = {f"torch:{OPERATOR}": "_unscale"}

    def applies(self) -> Choice[bool]:
        """Whether the device's own kernel halves a gradient of 1 to something else than 0.5."""
        import torch

        grad = torch.ones(1, dtype=torch.float16, device="mps")
        found, half = torch.zeros(1, device="mps"), torch.full((1,), 0.5, device="mps")
        getattr(torch.ops.aten, OPERATOR)([grad], found, half)
        if float(grad.cpu()) == 0.5:
            return Choice(False, "tried on the device: half-precision gradients are unscaled rightly")
        return Choice(True, f"tried on the device: half a gradient of 1 in float16 is {float(grad.cpu()):g}")

    def _unscale(self, stock: Stock, grads: Any, found_inf: Any, inv_scale: Any) -> Any:
        import torch

        half = grads and grads[0].device.type == "mps" and grads[0].dtype in (torch.float16, torch.bfloat16)
        if not half or not self.needed:
            return stock(grads, found_inf, inv_scale)
        self.acted("GradScaler unscales half-precision gradients in float32, where Metal would zero them", aloud=False)
        for grad in grads:  # one by one: all of them in float32 would be the model once more
            wide = grad.float()
            stock.part([wide], found_inf, inv_scale)
            grad.copy_(wide)
        return None


GUARD = HalfUnscale()
