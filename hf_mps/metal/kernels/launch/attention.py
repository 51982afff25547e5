"""Scaled dot-product attention: vector kernels for short queries, in one pass or two, and flash attention for others.

All facts are of operations/Attention.mm and kernels/{Decode,Prefill}Attention.h. Queries are [batch, heads, length,
size]; what no kernel takes is one MPSGraph.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, i32, i64, padded, u32

SOURCE = "operations/Attention.mm"
SHORT = 8
"""Queries at most this long go to the vector kernels."""
TWO_PASSES = 1024
"""Keys from this length on are split among BLOCKS threadgroups, whose results a second kernel joins."""
BLOCKS = 32
VECTOR_SIZES = frozenset((64, 96, 128, 256))
# Head size: queries and keys of a tile, simdgroups of a threadgroup.
TILES = dict.fromkeys((32, 64, 72, 80, 96), (32, 32, 4)) | {128: (32, 16, 4), 256: (16, 8, 2)}
_PREFILL_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

Result = tuple[Tensor, Tensor | None]


@rule("_scaled_dot_product_attention_math_for_mps", source=SOURCE)
def attention(
    release: Release,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Result:
    """Attention without dropout; the second result is what the host leaves there, never the weights."""
    if query.dtype not in _PREFILL_NAMES or key.dtype != query.dtype or value.dtype != query.dtype or dropout_p:
        raise NoRule("PyTorch refuses the arguments")
    four = [_four(each) for each in (query, key, value)]
    mask = None
    if attn_mask is not None:
        mask = _four(attn_mask.expand((*query.shape[:-1], key.shape[-2])))
    factor = math.sqrt(1.0 / query.shape[-1]) if scale is None else scale
    if _groups(*four) and _vector_covers(four, mask, is_causal):
        return _vector(release, [_rows(each) for each in four], mask, factor, is_causal, query)
    if _groups(*four) and _prefill_covers(four, mask):
        return _prefill(release, [_rows(each) for each in four], mask, factor, is_causal, query)
    raise NoRule("MPSGraph on this release")


def _four(given: Tensor) -> Tensor:
    if given.dim() < 3:
        raise NoRule("fewer than three dimensions")
    return given if given.dim() == 4 else given.unsqueeze(0) if given.dim() == 3 else given.flatten(0, -4)


def _rows(given: Tensor) -> Tensor:
    return given if given.stride(-1) == 1 else given.contiguous()


def _groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether batches agree and the heads of the keys divide those of the queries, as the kernels take for granted."""
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3] or query.shape[1] % max(key.shape[1], 1):
        raise NoRule("keys and values of another shape than the queries")
    return query.numel() > 0 and key.numel() > 0


def _vector_covers(four: list[Tensor], mask: Tensor | None, is_causal: bool) -> bool:
    query, key, value = four
    if mask is not None and (is_causal or mask.dtype not in (torch.bool, query.dtype)):
        return False
    sizes = query.shape[-1] == value.shape[-1] and query.shape[-1] in VECTOR_SIZES
    return sizes and query.shape[2] <= SHORT and query.shape[2] <= key.shape[2]


def _prefill_covers(four: list[Tensor], mask: Tensor | None) -> bool:
    query, _, value = four
    if mask is not None and mask.dtype not in (torch.bool, query.dtype):
        return False
    sizes = query.shape[-1] == value.shape[-1] and query.shape[-1] in TILES
    return sizes and query.shape[2] > SHORT and not _prefill_disabled()


@cache
def _prefill_disabled() -> bool:
    """PyTorch's own switch, read once a process."""
    return os.environ.get("PYTORCH_MPS_DISABLE_PREFILL_ATTENTION", "0") != "0"


def _vector(
    release: Release, four: list[Tensor], mask: Tensor | None, factor: float, is_causal: bool, given: Tensor
) -> Result:
    query, size = four[0], four[0].shape[-1]
    kind = "none" if mask is None else metal(mask.dtype)
    name = f"{metal(query.dtype)}_{size}_{size}_mask{kind}{'_causal' if is_causal else ''}"
    masked = {
        "mask": mask,
        "mask_strides": u32(_unsigned(mask.stride(at) for at in (3, 2, 1, 0))) if mask is not None else bytes(16),
    }
    return _one_or_two_passes(release, name, four, masked, factor, given)


def _one_or_two_passes(
    release: Release, name: str, four: list[Tensor], masked: Mapping[str, Any], factor: float, given: Tensor
) -> Result:
    query, key, value = four
    batch, heads, length, size = query.shape
    output = torch.empty((batch, heads, length, size), dtype=query.dtype, device=query.device)
    strides = [[each.stride(at) for each in four] for at in range(3)]
    arguments = {
        "queries": query,
        "keys": key,
        "values": value,
        "gqa_factor": u32(heads // key.shape[1]),
        "N": u32(key.shape[2]),
        "qkv_head_strides": padded(u32(_unsigned(strides[1])), 16),
        "qkv_seq_strides": padded(u32(_unsigned(strides[2])), 16),
        "scale": f32(factor),
        "qkv_batch_strides_heads": u32(_unsigned([*strides[0], heads])),
        **masked,
    }
    if key.shape[2] < TWO_PASSES:
        weights = torch.empty((batch, heads, length, key.shape[2]), dtype=query.dtype, device=query.device)
        kernel = release.kernel(f"sdpa_vector_{name}")
        kernel.launch({**arguments, "out": output}, groups=(batch * heads, length, 1), group=1024)
        return output.view(given.shape), weights.view(*given.shape[:-1], key.shape[2])
    first = release.kernel(f"sdpa_vector_2pass_1_{name}")
    second = release.kernel(f"sdpa_vector_2pass_2_{metal(query.dtype)}_{size}")
    parts = torch.empty((batch, heads, length, BLOCKS, size), dtype=query.dtype, device=query.device)
    sums, maxs = (torch.empty(parts.shape[:-1], device=query.device) for _ in range(2))
    kept = {"sums": sums, "maxs": maxs}
    first.launch({**arguments, "out": parts, **kept}, groups=(batch * heads, length, BLOCKS), group=8 * 32)
    second.launch({"partials": parts, **kept, "out": output}, groups=(batch * heads, length, 1), group=1024)
    return output.view(given.shape), parts


def _prefill(
    release: Release, four: list[Tensor], mask: Tensor | None, factor: float, is_causal: bool, given: Tensor
) -> Result:
    query, key, _ = four
    batch, heads, length, size = query.shape
    tile, keys, simdgroups = TILES[size]
    element = _PREFILL_NAMES[query.dtype]
    masked = element if mask is None or mask.dtype != torch.bool else "bool_"
    kernel = release.kernel(
        f"prefill_attention_{element}_bq{tile}_bk{keys}_bd{size}_wm{simdgroups}_wn1"
        f"_hm{int(mask is not None)}_dc{int(is_causal)}_mask{masked}"
    )
    mask = None if mask is None else _rows(mask)
    output = torch.empty((batch, heads, length, size), dtype=query.dtype, device=query.device)
    # Strides have 64 bits from 2.14 on, which the size of the struct says.
    declared = kernel.signature.at(4)
    whole = i32 if declared is not None and declared.size == 80 else i64
    parameters = i32(batch, heads, size, length, key.shape[2], heads // key.shape[1]) + f32(factor, 1.0)
    parameters += whole([each.stride(at) for each in (*four, output) for at in range(3)])
    kernel.launch(
        {
            "Q": four[0],
            "K": four[1],
            "V": four[2],
            "O": output,
            "params": parameters,
            "mask_params": None if mask is None else whole(mask.stride()),
            "mask": mask,
        },
        groups=(-(-length // tile), heads, batch),
        group=(32, simdgroups, 1),
    )
    return output.view(given.shape), None


def _unsigned(numbers: Iterable[int]) -> list[int]:
    """Numbers as a `uint` holds them: the host cuts strides to 32 bits."""
    return [number & 0xFFFF_FFFF for number in numbers]
