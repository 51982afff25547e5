"""Several linear layers of one input as one: one product forward, one for all gradients backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hf_mps.layer.fused_step import side_by_side


class JointLinear(torch.autograd.Function):
    """What each of several linear layers makes of (…, width); their rows lie side by side, and their results will.

    Gradients that arrive side by side, as `attention_in_one` leaves them, are used as they lie; others are brought
    together first.
    """

    @staticmethod
    def forward(ctx: Any, given: Tensor, dtype: torch.dtype, count: int, *learned: Tensor) -> Any:
        """`learned` are `count` weights and then as many biases or none; `dtype` is the one to compute in."""
        weights, biases = learned[:count], learned[count:]
        with torch.autocast(given.device.type, enabled=False):
            rows, weight = given.to(dtype), as_one(weights).to(dtype)
            bias = as_one(biases).to(dtype) if biases else None
            out = torch.nn.functional.linear(rows, weight, bias)
        ctx.save_for_backward(given, rows, weight, *learned)
        ctx.count = count
        ctx.set_materialize_grads(False)
        return tuple(side_by_side.pieces(out, [len(each) for each in weights], -1))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        """Its gradients; where they have to have gradients themselves, by operators that have."""
        given, rows, weight, *learned = ctx.saved_tensors
        asked = ctx.needs_input_grad[0], any(ctx.needs_input_grad[3 : 3 + ctx.count]), any(_biases(ctx))
        with torch.autocast(given.device.type, enabled=False):
            if torch.is_grad_enabled():
                return _differentiable(given, rows.dtype, learned, ctx.count, upstream)
            sizes = [len(each) for each in learned[: ctx.count]]
            arriving = together(upstream, sizes, rows)
            of_rows, of_weight, of_bias = gradients(rows, arriving, weight, asked)
            grads: list[Any] = [of_rows.to(given.dtype) if asked[0] else None, None, None]
            kinds = [(of_weight, asked[1])] + [(of_bias, asked[2])] * (len(learned) > ctx.count)
            for whole, wanted in kinds:
                parts = side_by_side.pieces(whole.to(learned[0].dtype), sizes, 0) if wanted else [None] * len(sizes)
                grads += parts
        return tuple(each if need else None for each, need in zip(grads, ctx.needs_input_grad, strict=True))


def gradients(rows: Tensor, arriving: Tensor, weight: Tensor, asked: tuple[bool, bool, bool]) -> Any:
    """The gradients of a linear layer's input, weight and bias, of those that are `asked` for.

    Metal has one operator for the three; elsewhere they are what autograd's own formula is, two products and a sum.
    """
    if rows.device.type == "mps":
        return torch.ops.aten.linear_backward(rows, arriving, weight, asked)
    places, came = rows.flatten(0, -2), arriving.flatten(0, -2)
    of_rows = arriving.matmul(weight) if asked[0] else None
    return of_rows, came.t().mm(places) if asked[1] else None, came.sum(0) if asked[2] else None


def _biases(ctx: Any) -> Any:
    return ctx.needs_input_grad[3 + ctx.count :]


def as_one(parameters: Sequence[Tensor]) -> Tensor:
    """The rows of several parameters, as they lie."""
    found = side_by_side.joined(parameters, 0)
    # They were brought together before; a hook of the program's may hand on copies.
    return torch.cat([each.detach() for each in parameters]) if found is None else found


def together(upstream: Sequence[Tensor | None], sizes: Sequence[int], rows: Tensor) -> Tensor:
    """The gradients of all results as one tensor."""
    there = [each for each in upstream if each is not None]
    if len(there) == len(sizes):
        found = side_by_side.joined(there, -1)
        if found is not None and found.is_contiguous():
            return found
    pairs = zip(upstream, sizes, strict=True)
    shape = rows.shape[:-1]
    return torch.cat([rows.new_zeros((*shape, size)) if each is None else each for each, size in pairs], -1)


def _differentiable(
    given: Tensor, dtype: torch.dtype, learned: Sequence[Tensor], count: int, upstream: Sequence[Tensor | None]
) -> Any:
    """The gradients as functions of everything, for gradients of gradients."""
    biases: Sequence[Tensor | None] = learned[count:] or [None] * count
    outs = []
    for weight, bias in zip(learned[:count], biases, strict=True):
        shift = None if bias is None else bias.to(dtype)
        outs.append(torch.nn.functional.linear(given.to(dtype), weight.to(dtype), shift))
    return differentiated(given, 3, learned, outs, upstream)


def differentiated(
    given: Tensor, start: int, learned: Sequence[Tensor], outs: Sequence[Tensor], upstream: Sequence[Tensor | None]
) -> Any:
    """What a Function's backward returns, by autograd: of its input, and of what it learns from argument `start` on."""
    pairs = [(out, each) for out, each in zip(outs, upstream, strict=True) if each is not None]
    wanted = [each for each in (given, *learned) if each.requires_grad]
    ours, theirs = [out for out, _ in pairs], [each for _, each in pairs]
    grads = iter(torch.autograd.grad(ours, wanted, theirs, create_graph=True, allow_unused=True))
    found = [next(grads) if each.requires_grad else None for each in (given, *learned)]
    return (found[0], *[None] * (start - 1), *found[1:])
