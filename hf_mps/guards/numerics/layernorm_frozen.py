"""layernorm-frozen: LayerNorm's weights get the right gradients also behind a part of the model that is not trained."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Patch
from hf_mps.guards import training_hooks
from hf_mps.guards.base import Guard

LAYER_NORM = "torch.nn.functional:layer_norm"


class LayernormFrozen(Guard):
    """Lets the input of such a layer norm ask for a gradient, as enable_input_require_grads does for a whole model."""

    name = "layernorm-frozen"
    what = "LayerNorm's weight and bias get wrong gradients when its input needs none, as behind a frozen backbone"
    issue = "https://github.com/pytorch/pytorch/issues/183825"
    until = "the oldest supported torch is 2.13, which has pull request #183893"
    releases = "<2.13"
    patches = {
        **training_hooks.parameters("_look"),
        # Only where the fault is there is torch.nn.functional touched.
        LAYER_NORM: Patch("_layer_norm", late=True),
    }

    def applies(self) -> Choice[bool]:
        """Whether a layer norm's gradients on the device depend on what its input asks for."""
        import torch

        found: list[torch.Tensor] = []
        for wanted in (True, False):
            x = torch.linspace(-1, 2, 8, device="mps").view(2, 4).requires_grad_(wanted)
            layer = torch.nn.LayerNorm(4, device="mps")
            loss = torch.layer_norm(x, (4,), layer.weight, layer.bias).square().sum()
            found += torch.autograd.grad(loss, (layer.weight, layer.bias, *([x] if wanted else [])))[:2]
        same = all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found[:2], found[2:], strict=True))
        if same:
            return Choice(
                False, "tried on the device: a layer norm's gradients are the same whatever its input asks for"
            )
        return Choice(True, "tried on the device: a layer norm's gradients are wrong when its input asks for none")

    def _look(self, parameters: list[Any]) -> None:

        if self.needed:
            self.arm(LAYER_NORM)

    def _layer_norm(
        self, stock: Any, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Any:
        import torch

        trained = any(each is not None and each.requires_grad for each in (weight, bias))
        alone = trained and not input.requires_grad and torch.is_grad_enabled()
        if alone and input.device.type == "mps" and self.needed:
            input = input.detach().requires_grad_()
            self.acted(
                "inputs of LayerNorm ask for gradients, without which this torch gives its weights wrong ones",
                aloud=False,
            )
        return stock(input, normalized_shape, weight, bias, eps)


GUARD = LayernormFrozen()
