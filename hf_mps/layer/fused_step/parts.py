"""Which parts a fused step has, and after which module of a library each is armed. Imports no torch."""

from __future__ import annotations

from hf_mps.core.import_hooks import Catalogue, registry_of

_BATCHES = ("one-copy", "loss-scalars", "padding-masks")


def _home(name: str) -> str:
    file = "batch_parts" if name in _BATCHES else name.replace("-", "_")
    return f"hf_mps.layer.fused_step.{file}"


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
    _home,
    lambda module, name: getattr(module, name.upper().replace("-", "_")),
)
registry = registry_of(PARTS)
"""Returns all parts of this process."""
