"""Attention that trains in the fewest operators: products, a softmax and a dropout, and one mask for all layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.fused_step import attention_in_one, constants
from hf_mps.layer.fused_step.autograd_kernels import AutogradKernel
from hf_mps.layer.fused_step.base import Part
from hf_mps.layer.guards.platform import batch_waits
from hf_mps.metal.device.no_modes import no_modes

LARGEST = 2**31
"""Scores of a call up to which it acts: what has more is limited by memory and arithmetic, not by launches."""
CAUSAL = 8
"""How many causal masks are kept."""
KEPT = 2**22
"""Elements of a causal mask up to which it is kept: 16 MiB."""


class ShortAttention(Part):
    """Stands before `scaled_dot_product_attention` where that trains on Metal without a kernel of its own.

    Stock makes a float mask in each layer, scales queries and keys each, and asks three times which rows are hidden
    whole (`_scaled_dot_product_attention_math`, ATen/native/transformers/attention.cpp). Here a mask is made once for
    the layers that are given it. Masks of floats, which may learn, stay stock's.
    """

    name = "short-attention"
    what = "attention in half as many launches"
    why = "the price of a small launch is the host's"
    patches = {"aten::scaled_dot_product_attention": AutogradKernel("_attended", when="concerns_call")}

    def __init__(self) -> None:
        super().__init__()
        self._masks = WeakTensorKeyDictionary()
        self._causal: dict[tuple[int, int, torch.device, int], Tensor] = {}

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a model that computes its attention itself."""
        asked = getattr(getattr(model, "config", None), "_attn_implementation", None)
        return self.what if asked == "sdpa" else ""

    def concerns_call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> bool:
        """Whether it trains, on a device that is ours, with as many heads of each and at most a mask of bools."""
        tensors = (query, key, value)
        return (
            query.device.type in self.devices
            and torch.is_grad_enabled()
            and any(each.requires_grad for each in tensors)
            and all(each.dim() == 4 and each.numel() > 0 and each.device == query.device for each in tensors)
            and query.dtype == key.dtype == value.dtype
            and query.is_floating_point()
            and query.shape[0] == key.shape[0] == value.shape[0]
            and key.shape[1] == value.shape[1]
            and (query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0))
            and (query.shape[3], key.shape[2]) == (key.shape[3], value.shape[2])
            and query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] < LARGEST
            and 0 <= dropout < 1
            and (scale is None or scale >= 0)
            and (mask is None or (not causal and _is_ours(mask, query, key)))
        )

    def _attended(
        self,
        stock: OriginalCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        **named: Any,
    ) -> Tensor:
        if query.shape[1] != key.shape[1]:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        scale = named.get("scale")
        scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
        hidden: attention_in_one.Hidden | None = None
        if mask is not None:
            hidden = self._of(mask, query.shape[1])
        elif causal:
            hidden = self._of_causal(query.shape[2], key.shape[2], query.device), None
        call = attention_in_one.Call(math.sqrt(scale), dropout, hidden)
        self.acts()
        # Hooks for what autograd keeps are the program's: checkpointing ends a replay by an error in one.
        out: Tensor = stock.foreign(attention_in_one.Attention.apply, query, key, value, call)
        return out

    def _of(self, mask: Tensor, heads: int) -> attention_in_one.Hidden:
        """What is added to the scores, and which rows see anything; the same for each layer that is given the mask."""
        # Layers are given views of one mask, cut anew each time.
        base = mask if mask._base is None else mask._base
        stream = constants.place_of(mask.device)
        place = (mask.storage_offset(), mask.shape, mask.stride(), mask._version, heads, stream)
        masks: Any = self._masks
        known = masks.setdefault(base, {})
        if place not in known:
            known.clear()
            known[place] = attention_in_one.hidden(mask, heads, all_see=_all_see(mask, base))
        found: attention_in_one.Hidden = known[place]
        return found

    def _of_causal(self, queries: int, keys: int, device: torch.device) -> Tensor:
        place = (queries, keys, *constants.place_of(device))
        found = self._causal.get(place)
        if found is None:
            with no_modes():
                seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_()
                found = attention_in_one.hidden(seen, 1)[0][0]
            if len(self._causal) >= CAUSAL:
                self._causal.clear()
            if found.numel() <= KEPT:
                self._causal[place] = found
        return found


def _all_see(mask: Tensor, batch: Tensor) -> bool:
    """Whether a mask is a batch's for all queries, and hides no row whole: its values on the host say so."""
    whole = mask.dim() == 4 and mask.stride(2) == 0 and mask.storage_offset() == batch.storage_offset()
    if not whole or (mask.shape[0], mask.shape[3]) != tuple(batch.shape) or mask.stride(3) != batch.stride(-1):
        return False
    host = batch_waits.GUARD.host(batch)
    return host is not None and bool(host.any(-1).all())


def _is_ours(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask is of bools, and of the scores' shape or of ones."""
    whole = (*query.shape[:3], key.shape[2])
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    fits = len(shape) == 4 and all(size in (1, most) for size, most in zip(shape, whole, strict=True))
    return mask.dtype == torch.bool and mask.device == query.device and fits and type(mask) is Tensor


PART = ShortAttention()
