"""The mask of a padded batch as a view of what the batch has, where transformers computes one for all queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Put
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.base import Part

MASKS = "transformers.masking_utils"


class PaddingMasks(Part):
    """Acts in training, where every query sees the same keys: encoders, with no more than padding to hide.

    transformers compares and indexes positions to make (batch, 1, queries, keys) of (batch, keys): a dozen launches.
    The mask has the same shape and the same bools here, and one row of memory for all queries.
    """

    name = "padding-masks"
    what = "an encoder's mask is a view of the batch's"
    why = "the price of a small launch is the host's, and a mask has a dozen"
    patches = {f"{MASKS}:AttentionMaskInterface._global_mapping": Put("_in_mapping")}

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a decoder, or a model that computes its attention itself."""
        config = getattr(model, "config", None)
        asked = getattr(config, "_attn_implementation", None)
        texts = hasattr(config, "vocab_size") and not getattr(config, "is_decoder", False)
        causal = "Causal" in type(model).__name__ or "LMHead" in type(model).__name__
        return self.what if asked == "sdpa" and texts and not causal else ""

    def _in_mapping(self, stock: dict[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
        """The table of who makes which implementation's mask, with ours around that of sdpa."""
        made = stock["sdpa"]
        if self.name not in getattr(made, "hf_mps_patches", ()):
            ours: Any = self.wrapped("sdpa_mask", made, self._mask)
            ours.hf_mps_patches = (*getattr(made, "hf_mps_patches", ()), self.name)
            stock["sdpa"] = ours
        return stock

    def _mask(self, stock: OriginalCall, *args: Any, **said: Any) -> Any:
        import transformers.masking_utils as masks

        mask: Any = said.get("attention_mask")
        simple = said.get("mask_function") is masks.bidirectional_mask_function and not said.get("use_vmap")
        if args or not simple or not self._ours(mask, said):
            return stock(*args, **said)
        keys = said["kv_length"]
        skips = said.get("allow_is_bidirectional_skip")
        if skips and masks._ignore_bidirectional_mask_sdpa(mask, keys, said.get("local_size")):
            return None
        self.acts()
        return mask[:, None, None, :].expand(-1, 1, said["q_length"], -1)

    def _ours(self, mask: Any, said: Mapping[str, Any]) -> bool:
        return (
            runs(mask)
            and mask.device.type in self.devices
            and torch.is_grad_enabled()
            and mask.dtype == torch.bool
            and mask.shape == (said.get("batch_size"), said.get("kv_length"))
            and said.get("allow_is_causal_skip") is False
            and not (said.get("kv_offset") or said.get("q_offset"))
        )


PART = PaddingMasks()
