"""Llama's rotation of queries and keys in one dispatch each way, where transformers' code has eight forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.training_kernels.library import TYPES, Source, by_place
from hf_mps.metal.training_kernels.trial import Case, case

SOURCE = Source("rotary.metal")
Pair = tuple[Tensor, Tensor]


def takes(query: Tensor, key: Tensor, cos: Tensor) -> bool:
    """Return whether the kernel has an instance for these, whose shapes go together."""
    return query.dtype in TYPES and (query.numel() + key.numel()) < 2**31 and cos.shape[0] in (1, query.shape[0])


def rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Return both turned: `x * cos + exchanged(x) * sin`, where the halves are exchanged and the second is negative.

    `query` and `key` (batch, heads, places, width), `cos` and `sin` (batch or 1, places, width), all of one dtype. The
    results have a place's heads side by side in memory. Differentiable as often as asked, by queries and keys.
    """
    return _turn(query, key, cos, sin, False)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Pair:
        if cos.stride() != sin.stride():  # the kernel has one pair of strides for both
            cos, sin = cos.contiguous(), sin.contiguous()
        query, key, cos, sin = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, cos, sin))
        turned = by_place(query.shape, like=query)[0], by_place(key.shape, like=query)[0]
        batch, heads, places, width = query.shape
        views = [number for each in (query, key, *turned) for number in each.stride()[:3]]
        angles = [0 if cos.shape[0] == 1 else cos.stride(0), cos.stride(1)]
        numbers = [heads, key.shape[1], places, width // 2, int(back), *views, *angles]
        SOURCE.kernel("turn", query.dtype)(
            *turned, query, key, cos, sin, numbers,
            threads=batch * places * (heads + key.shape[1]) * (width // 2), arg_casts="int32",
        )  # fmt: skip
        ctx.save_for_backward(cos, sin)
        ctx.back = back
        return turned

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> Any:
        return *_turn(of_query, of_key, *ctx.saved_tensors, not ctx.back), None, None, None


_turn: Callable[..., Pair] = _Rotation.apply


def written_out(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Return the same as transformers' models write it (modeling_llama.py, apply_rotary_pos_emb)."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    halves = [each.chunk(2, -1) for each in (query, key)]
    exchanged = [torch.cat((-second, first), -1) for first, second in halves]
    return query * cos + exchanged[0] * sin, key * cos + exchanged[1] * sin


def cases(_: str) -> Iterator[Case]:
    """Yield both ways of a decoder's queries and of its keys, which are fewer."""
    draw = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        sizes = ((2, 8, 64, 64), (2, 2, 64, 64), (1, 64, 64), (1, 64, 64), (2, 8, 64, 64), (2, 2, 64, 64))
        inputs = [torch.randn(size, generator=draw) for size in sizes]
        yield case("2 x 8 + 2 x 64 x 64", inputs, dtype, _side(rotated), _side(written_out))


def _side(turn: Callable[..., Pair]) -> Callable[..., Sequence[Tensor]]:
    def both_ways(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *upstream: Tensor) -> Sequence[Tensor]:
        leaves = [each.detach().requires_grad_() for each in (query, key)]
        found = turn(*leaves, cos, sin)
        return *(each.detach() for each in found), *torch.autograd.grad(found, leaves, upstream)

    return both_ways
