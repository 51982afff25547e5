"""Attention in blocks as transformers' models ask for it: `attn_implementation="blockwise"`, whatever their code.

What is known here is transformers' masking_utils.py and integrations/sdpa_attention.py: what a mask function is given,
and what an attention function is given and returns.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from hf_mps.layer.fused_step.attention import NAME
from hf_mps.layer.fused_step.attention.blockwise import attention
from hf_mps.layer.fused_step.attention.masks import BLOCK_BYTES, Causal, Given, Indexed, Mask, UnmadeMask

OWN = "sdpa"
"""What a model has where nobody asked for anything: PyTorch's own attention."""


def obstacle(model: Any) -> str:
    """Return why a model cannot have its attention in blocks, or ""."""
    config = getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or config is None:
        return f"{type(model).__name__} is no model of transformers"
    if config._attn_implementation not in (OWN, NAME):
        return f"{type(model).__name__} computes its attention with {config._attn_implementation}"
    if not hasattr(sys.modules[type(model).__module__], "ALL_ATTENTION_FUNCTIONS"):
        return f"{type(model).__name__} has its own attention, not one of transformers' list"
    return ""


def forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **named: Any,
) -> tuple[Tensor, None]:
    """Return the attention of one layer: (batch, queries, heads, width), and no weights.

    What PyTorch's own attention does in one block of memory without gradients (generation, short evaluations), and what
    only it can (paged caches), goes to transformers' `sdpa_attention_forward`. Raises what that raises.
    """
    # Nothing would be kept for a backward pass, and all scores are no more than one block's.
    learns = dropout or (torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)))
    small = not learns and 4 * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] <= BLOCK_BYTES
    if named.get("softcap") is not None or named.get("cache") is not None or small:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if isinstance(attention_mask, UnmadeMask):
            attention_mask = attention_mask.indexed.whole(query.device)
        named |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, "position_bias": position_bias}
        done: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
        return done
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    seen, bias = _mask_and_bias(attention_mask, is_causal and query.shape[2] > 1)
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    # As in autocast, where that is on: PyTorch's own attention is on its list of operators (lower precision).
    kind = query.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        query, key, value = (each.to(torch.get_autocast_dtype(kind)) for each in (query, key, value))
    if query.shape[0] != key.shape[0]:  # queries that are learned, one set for all rows
        query = query.expand(key.shape[0], -1, -1, -1)
    out = attention(query, key, value, seen, bias=bias, dropout=dropout, scale=scaling)
    return out.transpose(1, 2), None


def _mask_and_bias(given: Tensor | None, is_causal: bool) -> tuple[Mask | None, Tensor | None]:
    """Return the two parts of a layer's `attention_mask`: who sees whom, and what is added to the scores."""
    if given is None:
        return (Causal() if is_causal else None), None
    if isinstance(given, UnmadeMask):
        return given.indexed, None
    return (Given(given), None) if given.dtype == torch.bool else (None, given)


def mask(batch_size: int, q_length: int | None = None, kv_length: int | None = None, **named: Any) -> Tensor | None:
    """The mask of a forward pass, which is never made whole: an `UnmadeMask`, or None where the layer's own rule says
    it all. The arguments are those of transformers' `sdpa_mask`, given by their names.

    Whether a padding mask masks anything is not looked at: that would wait for the device. Functions that are not of
    indices (`use_vmap`), caches of fixed size and releases that name the queries otherwise (`cache_position` in 5.3)
    get the tensor of `sdpa_mask`.
    """
    q_offset, kv_offset, padding = named.get("q_offset", 0), named.get("kv_offset", 0), named.get("attention_mask")
    if q_length is None or kv_length is None or named.get("use_vmap") or isinstance(q_offset, Tensor):
        from transformers.masking_utils import sdpa_mask

        named |= {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        made: Tensor | None = sdpa_mask(**{name: value for name, value in named.items() if value is not None})
        return made
    size = named.get("local_size")
    if padding is None and (size is None or kv_length < size):
        begins_alike = q_length == kv_length and q_offset == kv_offset
        if named.get("allow_is_bidirectional_skip") or (named.get("allow_is_causal_skip", True) and begins_alike):
            return None
    elif padding is not None and padding.shape[-1] < kv_length + kv_offset:
        padding = torch.nn.functional.pad(padding, (0, kv_length + kv_offset - padding.shape[-1]))
    device = torch.device(named.get("device") or "cpu")
    described = {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": padding}
    return UnmadeMask(Indexed(named["mask_function"], (batch_size, q_length, kv_length), **described), device)
