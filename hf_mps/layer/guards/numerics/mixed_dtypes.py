"""mixed-dtypes: a layer norm of float32 weights may take half-precision inputs, though Metal misreads the weights."""

from __future__ import annotations

from typing import Any

from hf_mps.core.choice import Choice
from hf_mps.core.patching import Patch
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard

LAYER_NORM = "torch.nn.functional:layer_norm"


class MixedDtypes(Guard):
    """Computes such a layer norm in its weights' dtype, as the CPU does, and returns the input's.

    peft's prepare_model_for_kbit_training and models that keep their norms in float32 make such layers.
    """

    name = "mixed-dtypes"
    what = (
        "a layer norm of float32 weights over a half-precision input gives garbage, and its backward pass aborts Python"
    )
    patches = {
        # Frozen ones too: below an adapter the norms of the frozen model are misread as well.
        **training_hooks.parameters("_look", frozen=True),
        # Touched only where it must be.
        LAYER_NORM: Patch("_layer_norm", late=True),
    }

    def trial(self) -> Choice[bool]:
        """Whether such a layer norm's output on the device is wrong; its backward pass, which aborts, is not tried."""
        import torch

        x, weight = torch.linspace(-1, 2, 8).view(2, 4), torch.tensor([1.0, 0.5, 0.3, 0.1])
        with torch.no_grad():
            expected = torch.layer_norm(x, (4,), weight, weight)
            found = torch.layer_norm(x.half().to("mps"), (4,), weight.to("mps"), weight.to("mps"))
        if torch.allclose(found.cpu().float(), expected, atol=0.01):
            return Choice(False, "tried on the device: a layer norm of float32 weights over float16 is right")
        return Choice(True, "tried on the device: a layer norm of float32 weights over float16 is wrong")

    def _look(self, parameters: list[Any]) -> None:

        if len({parameter.dtype for parameter in parameters}) > 1 and self.needed:
            self.arm(LAYER_NORM)

    def _layer_norm(
        self, stock: Any, input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
    ) -> Any:
        import torch

        # Autocast gives a layer norm float32 throughout.
        mixed = weight is not None and weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type)
        if not mixed or input.device.type != "mps" or not self.needed:
            return stock(input, normalized_shape, weight, bias, eps)
        line = f"layer norms of {_word(weight)} weights over {_word(input)} are computed in {_word(weight)}"
        self.acted(line, aloud=False)
        return stock.partial(input.to(weight.dtype), normalized_shape, weight, bias, eps).to(input.dtype)


def _word(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


GUARD = MixedDtypes()
