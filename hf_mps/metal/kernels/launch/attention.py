"""Scaled dot-product attention: vector kernels for short queries, in one pass or two, and flash attention for others.

All facts are of operations/Attention.mm and kernels/{Decode,Prefill}Attention.h. Queries are [batch, heads, length,
size]; what no kernel takes is one MPSGraph.
"""

from __future__ import annotations

import math
import os
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.rules import GRAPH, kernels, refuse, rule
from hf_mps.metal.kernels.values import NoRule, f32, i32, i64, metal, padded, u32
from hf_mps.metal.operators.launch_class import SHORT_QUERY, TILES, VECTOR_SIZES

# Host: operations/Attention.mm.
TWO_PASSES = 1024
"""Keys from this length on are split among BLOCKS threadgroups, whose results a second kernel joins."""
BLOCKS = 32
_PREFILL_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

Result = tuple[Tensor, Tensor | None]


@rule("_scaled_dot_product_attention_math_for_mps")
def attention(
    query: Tensor, key: Tensor, value: Tensor, *rest: Any, scale: float | None = None, enable_gqa: bool = False
) -> Result:
    """Attention without dropout; the second result is what the host leaves there, never the weights.

    `rest` are a mask, the probability of dropout, whether attention is causal, and a mask of dropout.
    """
    attn_mask, dropout_p, is_causal = (*rest, *(None, 0.0, False)[len(rest) :])[:3]
    refuse(query.dtype not in _PREFILL_NAMES or key.dtype != query.dtype or value.dtype != query.dtype or dropout_p)
    four = [_four(each) for each in (query, key, value)]
    mask = None if attn_mask is None else _four(attn_mask.expand((*query.shape[:-1], key.shape[-2])))
    factor = math.sqrt(1.0 / query.shape[-1]) if scale is None else scale
    length, size = query.shape[-2:]
    covered = _groups(*four) and size == value.shape[-1] and (mask is None or mask.dtype in (torch.bool, query.dtype))
    few = length <= min(SHORT_QUERY, key.shape[-2]) and not (is_causal and mask is not None)
    # Rows are made contiguous only for what a kernel takes: a refusal must have launched nothing.
    if covered and few and size in VECTOR_SIZES:
        return _vector([_rows(each) for each in four], mask, factor, is_causal, query)
    if covered and length > SHORT_QUERY and size in TILES and not _prefill_disabled():
        return _prefill([_rows(each) for each in four], mask, factor, is_causal, query)
    raise NoRule(GRAPH)


def _four(given: Tensor) -> Tensor:
    refuse(given.dim() < 3, "fewer than three dimensions")
    return given if given.dim() == 4 else given.unsqueeze(0) if given.dim() == 3 else given.flatten(0, -4)


def _rows(given: Tensor) -> Tensor:
    return given if given.stride(-1) == 1 else given.contiguous()


def _groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether batches agree and the heads of the keys divide those of the queries, as the kernels take for granted."""
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3] or query.shape[1] % max(key.shape[1], 1):
        raise NoRule("keys and values of another shape than the queries")
    return query.numel() > 0 and key.numel() > 0


@cache
def _prefill_disabled() -> bool:
    """PyTorch's own switch, read once a process."""
    return os.environ.get("PYTORCH_MPS_DISABLE_PREFILL_ATTENTION", "0") != "0"


def _vector(four: list[Tensor], mask: Tensor | None, factor: float, is_causal: bool, given: Tensor) -> Result:
    """One pass, or from TWO_PASSES keys on two."""
    query, key, value = four
    batch, heads, length, size = query.shape
    kind = "none" if mask is None else metal(mask.dtype)
    name = f"{metal(query.dtype)}_{size}_{size}_mask{kind}{'_causal' if is_causal else ''}"
    output = torch.empty((batch, heads, length, size), dtype=query.dtype, device=query.device)
    of_batch, of_head, of_row = ([each.stride(at) for each in four] for at in range(3))
    arguments: dict[str, Tensor | bytes | None] = {"queries": query, "keys": key, "values": value, "mask": mask}
    arguments |= {"gqa_factor": u32(heads // key.shape[1]), "N": u32(key.shape[2]), "scale": f32(factor)}
    arguments |= {"qkv_head_strides": _unsigned(*of_head), "qkv_seq_strides": _unsigned(*of_row)}
    arguments["qkv_batch_strides_heads"] = _unsigned(*of_batch, heads)
    arguments["mask_strides"] = bytes(16) if mask is None else _unsigned(*reversed(mask.stride()))
    if key.shape[2] < TWO_PASSES:
        weights = torch.empty((batch, heads, length, key.shape[2]), dtype=query.dtype, device=query.device)
        kernel = kernels[f"sdpa_vector_{name}"]
        kernel.launch({**arguments, "out": output}, groups=(batch * heads, length, 1), group=1024)
        return output.view(given.shape), weights.view(*given.shape[:-1], key.shape[2])
    first = kernels[f"sdpa_vector_2pass_1_{name}"]
    second = kernels[f"sdpa_vector_2pass_2_{metal(query.dtype)}_{size}"]
    parts = torch.empty((batch, heads, length, BLOCKS, size), dtype=query.dtype, device=query.device)
    sums, maxs = (torch.empty(parts.shape[:-1], dtype=torch.float32, device=query.device) for _ in range(2))
    kept = {"sums": sums, "maxs": maxs}
    first.launch({**arguments, "out": parts, **kept}, groups=(batch * heads, length, BLOCKS), group=8 * 32)
    second.launch({"partials": parts, **kept, "out": output}, groups=(batch * heads, length, 1), group=1024)
    return output.view(given.shape), parts


def _prefill(four: list[Tensor], mask: Tensor | None, factor: float, is_causal: bool, given: Tensor) -> Result:
    query, key, _ = four
    batch, heads, length, size = query.shape
    tile, keys, simdgroups = TILES[size]
    element = _PREFILL_NAMES[query.dtype]
    masked = element if mask is None or mask.dtype != torch.bool else "bool_"
    name = (
        f"prefill_attention_{element}_bq{tile}_bk{keys}_bd{size}_wm{simdgroups}_wn1"
        f"_hm{int(mask is not None)}_dc{int(is_causal)}_mask{masked}"
    )
    kernel = kernels[name]
    mask = None if mask is None else _rows(mask)
    output = torch.empty((batch, heads, length, size), dtype=query.dtype, device=query.device)
    # Strides have 64 bits from 2.14 on, which the size of the struct says.
    declared = kernel.signature.at(4)
    whole = i32 if declared is not None and declared.size == 80 else i64
    parameters = i32(batch, heads, size, length, key.shape[2], heads // key.shape[1]) + f32(factor, 1.0)
    parameters += whole([each.stride(at) for each in (*four, output) for at in range(3)])
    arguments = {"Q": four[0], "K": four[1], "V": four[2], "O": output, "params": parameters, "mask": mask}
    arguments["mask_params"] = None if mask is None else whole(mask.stride())
    kernel.launch(arguments, groups=(-(-length // tile), heads, batch), group=(32, simdgroups, 1))
    return output.view(given.shape), None


def _unsigned(*numbers: int) -> bytes:
    """Return numbers as a `uint4` holds them: the host cuts strides to 32 bits."""
    return padded(u32([number & 0xFFFF_FFFF for number in numbers]), 16)
