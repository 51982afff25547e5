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
    """What is no tensor to learn: the root of the scores' factor, the share that is dropped, and what is hidden."""

    root: float
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
            queries, keys, values = _scaled(query, call), _scaled(key, call), _dense(value)
            chances = _chances(torch.bmm(queries, keys.transpose(1, 2)), query, call)
            used, kept = torch.native_dropout(chances, call.dropout, True) if call.dropout else (chances, None)
            out = torch.bmm(used, values).view(*query.shape[:3], -1).to(query.dtype)
        dropped = used if call.dropout else None
        ctx.save_for_backward(query, key, value, queries, keys, values, chances, dropped, kept)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        """Its gradients; where they have to have gradients themselves, by operators that have."""
        query, key, value, queries, keys, values, chances, dropped, kept = ctx.saved_tensors
        call = ctx.call
        with torch.autocast(upstream.device.type, enabled=False):
            if torch.is_grad_enabled():
                return (*_differentiable(query, key, value, kept, call, upstream), None)
            arriving = _dense(upstream)
            of_value = torch.bmm((chances if dropped is None else dropped).transpose(1, 2), arriving)
            by_score = torch.bmm(arriving, values.transpose(1, 2))
            if kept is not None:
                by_score = torch.ops.aten.native_dropout_backward(by_score, kept, 1 / (1 - call.dropout))
            by_score = torch._softmax_backward_data(by_score, chances, -1, torch.float32)
            of_query = _by_place(torch.bmm(by_score, keys), query, call)
            of_key = _by_place(torch.bmm(by_score.transpose(1, 2), queries), key, call)
        return of_query, of_key, of_value.view(value.shape).to(value.dtype), None


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


def _scaled(given: Tensor, call: Call) -> Tensor:
    """Queries or keys times the root of the scale, as stock has it; dense (batch x heads, places, width), float32."""
    dense = torch.empty(given.shape, dtype=torch.float32, device=given.device)
    if given.dtype == torch.float32:
        torch.mul(given, call.root, out=dense)
    else:
        dense.copy_(given).mul_(call.root)
    return dense.flatten(0, 1)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous().flatten(0, 1)


def _by_place(gradient: Tensor, like: Tensor, call: Call) -> Tensor:
    """The gradient of queries or keys, by that of what was scaled: a place's heads side by side, as models use them.

    The gradient of the projection before is then a view of it.
    """
    batch, heads, places, width = like.shape
    whole = torch.empty(batch, places, heads, width, dtype=torch.float32, device=like.device).transpose(1, 2)
    return torch.mul(gradient.view(like.shape), call.root, out=whole).to(like.dtype)


def _differentiable(
    query: Tensor, key: Tensor, value: Tensor, kept: Tensor | None, call: Call, upstream: Tensor
) -> tuple[Tensor, ...]:
    """The gradients as functions of everything, for gradients of gradients."""
    scores = torch.matmul(query.float() * call.root, (key.float() * call.root).transpose(-2, -1))
    added, alive = call.hidden or (None, None)
    chances = torch.softmax(scores if added is None else scores + added, -1)
    chances = chances if alive is None else chances * alive
    if kept is not None:
        chances = chances * kept.view(chances.shape) / (1 - call.dropout)
    out = torch.matmul(chances, value.float()).to(query.dtype)
    return torch.autograd.grad(out, (query, key, value), upstream, create_graph=True, allow_unused=True)
