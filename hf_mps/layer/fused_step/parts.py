"""Which parts a fused step has, and after which module of a library each is armed. Imports no torch."""

from __future__ import annotations

from hf_mps.core.import_hooks import Catalogue
from hf_mps.core.registry import registry_of

# Files with several parts; each of the others is called as its part is.
_FILES = {
    **dict.fromkeys(("one-copy", "loss-scalars", "padding-masks"), "batch_parts"),
    **dict.fromkeys(("decoder-pieces", "fixed-positions"), "decoder"),
    **dict.fromkeys(("gradient-clip", "fused-optimizer"), "optimizer"),
}

# Module -> the parts that patch something in it. The header has their words in this order.
PARTS = Catalogue(
    "step",
    {
        "torch": "gradient-clip fused-optimizer fused-dropout norms short-attention one-copy",
        "accelerate.accelerator": "loss-scalars",
        "transformers.trainer": "loss-scalars",
        "transformers.modeling_utils": "activations joint-projections norms decoder-pieces fixed-positions",
        "transformers.masking_utils": "padding-masks",
    },
    lambda name: f"hf_mps.layer.fused_step.{_FILES.get(name, name.replace('-', '_'))}",
    lambda module, name: getattr(module, name.upper().replace("-", "_")),
)
registry = registry_of(PARTS)
"""Returns all parts of this process."""
