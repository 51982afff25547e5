"""fp16-fused-adam: GradScaler itself skips a step that overflowed, where the fused optimizers would not."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.guards.base import Guard

_HANDLES_SCALE = "_step_supports_amp_scaling"


class Fp16FusedAdam(Guard):
    """Hides, while GradScaler steps, the mark of fused optimizers by which it leaves unscaling and skipping to them.

    GradScaler then does both, as it does for every other optimizer, and the fused kernel stays. In Trainer this is
    what `optim=adamw_torch` would do, and it reaches Accelerate, Lightning and plain loops as well.
    """

    name = "fp16-fused-adam"
    what = "fused Adam, AdamW and SGD ignore found_inf and grad_scale, so steps that overflowed in fp16 are applied"
    issue = "https://github.com/pytorch/pytorch/pull/186360"
    until = "the oldest supported torch is 2.13"
    releases = "<2.13"
    patches = {"torch.amp:GradScaler.step": "_step"}

    def applies(self) -> Choice[bool]:
        """Whether a fused step on the device that is told of an overflow changes its parameter."""
        import torch

        parameter = torch.nn.Parameter(torch.ones(4, device="mps"))
        parameter.grad = torch.ones_like(parameter)
        optimizer: Any = torch.optim.AdamW([parameter], fused=True)
        optimizer.found_inf = torch.ones((), device="mps")
        optimizer.step()
        if bool((parameter == 1).all()):
            return Choice(False, "tried on the device: a fused step that overflowed is not applied")
        return Choice(True, "tried on the device: a fused step that overflowed is applied")

    def _step(self, stock: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (getattr(optimizer, _HANDLES_SCALE, False) and _on_metal(optimizer) and self.needed):
            return stock(scaler, optimizer, *args, **kwargs)
        self.acted(
            "GradScaler unscales and skips for the fused optimizer, which would apply steps that overflowed",
            aloud=False,
        )
        unscale = scaler._unscale_grads_
        # GradScaler refuses gradients of float16 parameters, unless it is for a fused optimizer.
        scaler._unscale_grads_ = lambda optimizer, inverse, found, _: unscale(optimizer, inverse, found, True)
        setattr(optimizer, _HANDLES_SCALE, False)
        try:
            return stock(scaler, optimizer, *args, **kwargs)
        finally:
            setattr(optimizer, _HANDLES_SCALE, True)
            del scaler._unscale_grads_


def _on_metal(optimizer: Any) -> bool:
    return any(parameter.device.type == "mps" for group in optimizer.param_groups for parameter in group["params"])


GUARD = Fp16FusedAdam()
