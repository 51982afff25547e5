"""`use_kernels=True` of a model of transformers takes hf_mps' kernels too, where it trains on mps.

The package kernels replaces a layer by one from the hub, and transformers (integrations/hub_kernels.py) names none for
training on mps, LayerNorm and Llama's MLP on no device. Ours are around the classes, which a replaced layer leaves.
"""

from __future__ import annotations

from typing import Any

from hf_mps.core import settings
from hf_mps.core.patching import OriginalCall
from hf_mps.layer.fused_step import switch

REASON = "a model with use_kernels=True trains with hf_mps' kernels, where the package kernels is installed"
PARTS = ("activations", "norms", "decoder-pieces")
patches = {"transformers.modeling_utils:PreTrainedModel.set_use_kernels": "_asked"}


def _asked(stock: OriginalCall, model: Any, use_kernels: Any, *args: Any, **kwargs: Any) -> Any:
    from transformers.utils.import_utils import is_kernels_available

    # Ours first: kernels binds to each layer what its class has at that moment.
    if use_kernels and is_kernels_available() and settings.fused_step() is not False:
        switch.for_scripts(asked="use_kernels=True", names=PARTS)
    return stock(model, use_kernels, *args, **kwargs)
