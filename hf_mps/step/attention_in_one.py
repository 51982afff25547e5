"""Attention in few operators, forward and backward: products, a softmax, a dropout, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Hidden = tuple[Tensor, Tensor | None]
"""What is added to the scores, the least float32 where a key is hidden; and 0 for a query that sees nothing, else 1."""


@dataclass(frozen=True)
class Call:
    """What is no tensor to learn: the factor of the scores, the share that is dropped, and what is hidden."""

    scale: float
    dropout: float
    hidden: Hidden | None


def hidden(seen: Tensor) -> Hidden:
    """The same for a mask of bools that is True where a query sees a key; both have its dimensions.

    A score so low becomes 0 beside any other. Where all of a row are, the softmax would be even: stock makes zeros
    (`_safe_softmax`), and the second tensor does.
    """
    added = torch.zeros(seen.shape, dtype=torch.float32, device=seen.device)
    added.masked_fill_(seen.logical_not(), torch.finfo(torch.float32).min)
    return added, seen.any(-1, keepdim=True).to(torch.float32)


class Attention(torch.autograd.Function):
    """softmax(query · key · scale + hidden) · value of (batch, heads, places, width), in float32, as stock's.

    The tensors that it keeps are fewer than stock's: the scores after the softmax, those after dropout, and dropout's
    mask as bools.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """(batch, heads, queries, width of value), contiguous, in the dtype of the query."""
        with torch.autocast(query.device.type, enabled=False):
            scaled = _scaled(query, call.scale)
            keys, values = _both(key, value)
            chances = _chances(torch.bmm(scaled, keys.transpose(1, 2)), query, call)
            used, kept = torch.native_dropout(chances, call.dropout, True) if call.dropout else (chances, None)
            out = torch.bmm(used, values).view(*query.shape[:3], -1).to(query.dtype)
        ctx.save_for_backward(query, key, value, scaled, keys, values, chances, used if call.dropout else None, kept)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        """Its gradients; where they have to have gradients themselves, by operators that have."""
        query, key, value, scaled, keys, values, chances, used, kept = ctx.saved_tensors
        call = ctx.call
        with torch.autocast(upstream.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*_differentiable(query, key, value, kept, call, upstream), None)
            arriving = _dense(upstream)
            both = (
                torch.empty(2, *values.shape, dtype=values.dtype, device=values.device) if _alike(key, value) else None
            )
            used = chances if used is None else used
            of_value = torch.bmm(used.transpose(1, 2), arriving, **_into(both, 1))
            by_score = torch.bmm(arriving, values.transpose(1, 2))
            if kept is not None:
                by_score = torch.ops.aten.native_dropout_backward(by_score, kept, 1 / (1 - call.dropout))
            by_score = torch._softmax_backward_data(by_score, chances, -1, torch.float32)
            of_key = torch.bmm(by_score.transpose(1, 2), scaled, **_into(both, 0))
            of_query = _by_place(query, torch.float32)
            torch.mul(torch.bmm(by_score, keys).view(query.shape), call.scale, out=of_query)
            of_key, of_value = (
                _apart(both, key) if both is not None else (of_key.view(key.shape), of_value.view(value.shape))
            )
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None


def _chances(scores: Tensor, query: Tensor, call: Call) -> Tensor:
    """The softmax of scores (batch x heads, queries, keys), which are overwritten."""
    if call.hidden is None:
        return torch.softmax(scores, -1)
    added, alive = call.hidden
    apart = scores.view(*query.shape[:3], -1)
    apart.add_(added)
    chances = torch.softmax(apart, -1)
    if alive is not None:
        chances.mul_(alive)
    return chances.view(scores.shape)


def _scaled(query: Tensor, scale: float) -> Tensor:
    """`query` times `scale`, dense (batch x heads, queries, width), in float32."""
    dense = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    if query.dtype == torch.float32:
        torch.mul(query, scale, out=dense)
    else:
        dense.copy_(query).mul_(scale)
    return dense.flatten(0, 1)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous().flatten(0, 1)


def _both(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, dense and in float32: in one copy where they lie at the same distance everywhere."""
    distance = value.storage_offset() - key.storage_offset()
    beside = key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() and key.stride() == value.stride()
    if not (beside and distance > 0 and key.shape == value.shape):
        return _dense(key), _dense(value)
    whole = key.as_strided((2, *key.shape), (distance, *key.stride()), key.storage_offset())
    together = torch.empty(whole.shape, dtype=torch.float32, device=key.device).copy_(whole)
    return together[0].flatten(0, 1), together[1].flatten(0, 1)


def _alike(key: Tensor, value: Tensor) -> bool:
    return key.shape == value.shape


def _into(both: Tensor | None, place: int) -> dict[str, Tensor]:
    return {} if both is None else {"out": both[place]}


def _by_place(like: Tensor, dtype: torch.dtype, count: int = 1) -> Tensor:
    """Memory for tensors (batch, heads, places, width) in which a place's heads lie side by side, as models use them.

    The gradient of the projection before is then a view. `count` tensors make a dimension in front.
    """
    batch, heads, places, width = like.shape
    whole = torch.empty(batch, places, count, heads, width, dtype=dtype, device=like.device).permute(2, 0, 3, 1, 4)
    return whole[0] if count == 1 else whole


def _apart(both: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The two halves of (2, batch x heads, places, width), by one copy."""
    of_key, of_value = _by_place(like, both.dtype, 2).copy_(both.view(2, *like.shape)).unbind(0)
    return of_key, of_value


def _differentiable(
    query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, call: Call, upstream: Tensor
) -> tuple[Tensor, ...]:
    """The gradients as functions of everything, for gradients of gradients."""
    scores = torch.matmul(query.float() * call.scale, key.float().transpose(-2, -1))
    added, alive = call.hidden or (None, None)
    chances = torch.softmax(scores if added is None else scores + added, -1)
    chances = chances if alive is None else chances * alive
    if kept is not None:
        chances = chances * kept.view(chances.shape) / (1 - call.dropout)
    out = torch.matmul(chances, value.float()).to(query.dtype)
    return torch.autograd.grad(out, (query, key, value), upstream, create_graph=True, allow_unused=True)
