"""Attention in blocks: the forward pass keeps its output and a number for each query, the backward pass computes anew.

PyTorch's attention on Metal keeps queries x keys numbers for every head when it trains (`_scaled_dot_product_attention_
math`, aten/src/ATen/native/transformers/attention.cpp), twice or thrice with dropout. Here a block's scores are gone
when its output is there; what is kept of them is the logarithm of each row's sum, from which the backward pass has the
probabilities again (Dao and others, FlashAttention, arXiv:2205.14135, and Rabe and Staats, arXiv:2112.05682). One more
product of the size of the scores is the price, and a causal call leaves out nearly half of all products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_mps.layer.fused_step.attention.masks import BLOCK_BYTES, SUMMED, Block, Mask, Shape, Span, cut, part

HALVES = (torch.float16, torch.bfloat16)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None = None,
    *,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    scale: float | None = None,
    budget: int = BLOCK_BYTES,
) -> Tensor:
    """Return softmax(query · key · scale + bias) · value, differentiable once, as PyTorch's attention does.

    `query` is (batch, heads, queries, width), `key` and `value` (batch, fewer or equal heads, keys, width); the result
    is (batch, heads, queries, width of value) in their dtype, and lies in memory as (batch, queries, heads, width).
    `mask` says who sees whom; a query that sees nothing gets zeros. `bias` broadcasts to (batch, heads, queries, keys)
    and may need a gradient. `scale` is 1 / sqrt(width) by default. `budget` is in bytes of one block's scores. Half
    precision is added up in float32. Dropout's draws come from the device's generator, whose state is kept for the
    backward pass.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    call = _Call(mask, scale, dropout, budget)
    attend: Callable[..., Tensor] = _Blockwise.apply
    return attend(query, key, value, bias, call)


@dataclass
class _Call:
    """What is no tensor, and what the forward pass leaves to the backward pass."""

    mask: Mask | None
    scale: float
    dropout: float
    budget: int
    random: Tensor | None = field(default=None, compare=False)

    def blocks(self, query: Tensor, key: Tensor) -> Iterator[Block]:
        batch, heads, queries, _ = query.shape
        shape = Shape(batch, key.shape[1], heads // key.shape[1], queries, key.shape[2])
        return cut(shape, self.mask.span if self.mask else Span(), self.budget)

    def scores(self, block: Block, query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
        """(heads of the block, queries of a group, keys): products, with what may not be seen at minus infinity."""
        scores = torch.bmm(query, key.transpose(1, 2))
        apart = scores.view(*_grouped(block), -1, block.queries.stop - block.queries.start, scores.shape[-1])
        if bias is not None:
            apart.add_(_by_group(part(bias, block), block, apart.shape[2]))
        seen = self.mask.block(block, query.device) if self.mask else None
        if seen is not None:
            apart.masked_fill_(_by_group(seen, block, apart.shape[2]).logical_not(), -math.inf)
        return scores


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        with _without_autocast(query.device):
            call.random = _generator(query.device).get_state() if call.dropout else None
            out, sums = _forward(call, query, key, value, bias)
        ctx.call = call
        ctx.save_for_backward(query, key, value, bias, out, sums)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        device, call = upstream.device, ctx.call
        with _without_autocast(device), _replayed(call.random, device):
            return (*_backward(call, upstream, ctx.saved_tensors, ctx.needs_input_grad), None)


def _without_autocast(device: torch.device) -> Any:
    """Compute in the dtypes that come. A trace on the device meta has no autocast, and PyTorch raises for it."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _forward(call: _Call, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the output, and the logarithm of each row's sum (batch, key heads, group, queries)."""
    batch, heads, queries, _ = query.shape
    groups = (key.shape[1], heads // key.shape[1])
    out = query.new_empty(batch, queries, heads, value.shape[-1], dtype=value.dtype).transpose(1, 2)
    dtype = torch.float32 if query.dtype in HALVES else query.dtype
    sums = query.new_empty(batch, *groups, queries, dtype=dtype)
    asked, outcome = _by_head(query, groups), _by_head(out, groups)
    keys, values = (_flat(tensor, dtype) for tensor in (key, value))
    for block in call.blocks(query, key):
        place = _place(block)
        scores = call.scores(block, _rows(asked[place], dtype) * call.scale, _of(keys, block), bias)
        # A query that sees nothing: the highest of its scores is made finite, and its sum, of zeros, at least 1.
        highest = scores.amax(-1, keepdim=True).clamp_(min=torch.finfo(dtype).min)
        scores.sub_(highest).exp_()
        total = scores.sum(-1, keepdim=True).clamp_(min=1)
        if call.dropout:
            scores = torch.native_dropout(scores, call.dropout, True)[0]
        weighted = _over_keys(scores, _of(values, block)).div_(total)
        del scores
        outcome[place] = weighted.view_as(outcome[place])
        sums[place] = highest.add_(total.log_()).view_as(sums[place])
    return out, sums


def _backward(call: _Call, upstream: Tensor, saved: tuple[Any, ...], needed: tuple[bool, ...]) -> tuple[Any, ...]:
    """Return the gradients of query, key, value and bias; None where one is not needed."""
    query, key, value, bias, out, sums = saved
    groups, dtype = sums.shape[1:3], sums.dtype
    keys, values = (_flat(tensor, dtype) for tensor in (key, value))
    of_query = torch.empty_like(query) if needed[0] else None
    of_key, of_value = (
        torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format) if need else None
        for tensor, need in zip((key, value), needed[1:3], strict=True)
    )
    of_bias = torch.zeros_like(bias) if needed[3] else None
    asked, outcome, arriving = (_by_head(tensor, groups) for tensor in (query, out, upstream))
    for block in call.blocks(query, key):
        place = _place(block)
        rows, gradient = (_rows(tensor[place], dtype) for tensor in (asked, arriving))
        rows = rows * call.scale
        share = (gradient * _rows(outcome[place], dtype)).sum(-1, keepdim=True)
        block_keys = _of(keys, block)
        chances = call.scores(block, rows, block_keys, bias).sub_(_rows(sums[place].unsqueeze(-1), dtype)).exp_()
        dropped, kept = torch.native_dropout(chances, call.dropout, True) if call.dropout else (chances, None)
        if of_value is not None:
            _add(of_value, block, torch.bmm(dropped.transpose(1, 2), gradient))
        del dropped
        # The gradient by the block's scores, before the scale.
        by_score = torch.bmm(gradient, _of(values, block).transpose(1, 2))
        if kept is not None:
            by_score.mul_(kept).mul_(1 / (1 - call.dropout) if call.dropout < 1 else 0.0)
        by_score.sub_(share).mul_(chances)
        del chances, kept
        if of_bias is not None:
            _add_bias(of_bias, block, by_score, groups[1])
        if of_key is not None:
            _add(of_key, block, torch.bmm(by_score.transpose(1, 2), rows))
        if of_query is not None:
            there = _by_head(of_query, groups)[place]
            there.copy_(_over_keys(by_score, block_keys).mul_(call.scale).view_as(there))
    of_key = None if of_key is None else of_key.to(key.dtype)
    return of_query, of_key, None if of_value is None else of_value.to(value.dtype), of_bias


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values as they are multiplied by: dense, in the dtype of the sums."""
    return tensor.to(dtype).contiguous()


def _of(tensor: Tensor, block: Block) -> Tensor:
    """Return a block's keys or values: (batch x heads, keys, width)."""
    return tensor[block.batch, block.heads, block.keys].flatten(0, 1)


def _by_head(tensor: Tensor, groups: Any) -> Tensor:
    """(batch, query heads, …) as (batch, key heads, group, …)."""
    return tensor.view(tensor.shape[0], *groups, *tensor.shape[2:])


def _place(block: Block) -> tuple[slice, ...]:
    """Return where a block's queries stand in (batch, key heads, group, queries, …)."""
    return (block.batch, block.heads, slice(None), block.queries)


def _rows(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """(batch, key heads, group, queries, width) as the products take it: a group's heads are rows of one matrix."""
    return tensor.to(dtype).flatten(0, 1).flatten(1, 2)


def _grouped(block: Block) -> tuple[int, int]:
    return block.batch.stop - block.batch.start, block.heads.stop - block.heads.start


def _by_group(mask: Tensor, block: Block, group: int) -> Tensor:
    """(batch or 1, query heads or 1, queries, keys) as (…, key heads or 1, group or 1, queries, keys)."""
    return mask.unsqueeze(1) if mask.shape[1] == 1 else _by_head(mask, (-1, group))[:, block.heads]


def _over_keys(weights: Tensor, values: Tensor) -> Tensor:
    """`weights` (…, rows, keys) times `values` (…, keys, width), never more than SUMMED products in one sum."""
    keys = weights.shape[-1]
    result = torch.bmm(weights[..., :SUMMED], values[:, :SUMMED])
    for start in range(SUMMED, keys, SUMMED):
        result += torch.bmm(weights[..., start : start + SUMMED], values[:, start : start + SUMMED])
    return result


def _add(total: Tensor, block: Block, product: Tensor) -> None:
    # Not baddbmm_ into the slice: products into tensors with gaps have been lost on Metal.
    there = total[block.batch, block.heads, block.keys]
    there.add_(product.view_as(there))


def _add_bias(total: Tensor, block: Block, by_score: Tensor, group: int) -> None:
    queries = block.queries.stop - block.queries.start
    whole = by_score.view(*_grouped(block), group, queries, -1)
    there = part(total, block)
    if there.shape[1] == 1:
        whole = whole.sum((1, 2)).unsqueeze(1)
    else:
        whole, there = whole.flatten(1, 2), _by_head(there, (-1, group))[:, block.heads].flatten(1, 2)
    there.add_(whole.sum_to_size(there.shape).to(there.dtype))


def _generator(device: torch.device) -> torch.Generator:
    if device.type in ("cpu", "meta"):  # a trace on meta draws nothing
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    of_all = getattr(module, "default_generators", None)
    if of_all:
        return of_all[device.index or 0]  # type: ignore[no-any-return]
    # Not torch.mps.set_rng_state: it clones the state, which is a fake tensor in a plan and ends the process.
    return module._get_default_mps_generator()  # type: ignore[no-any-return]


@contextmanager
def _replayed(state: Tensor | None, device: torch.device) -> Iterator[None]:
    """Draw from a kept state of the device's generator, and leave that as it was."""
    if state is None:
        yield
        return
    generator = _generator(device)
    now = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(now)
