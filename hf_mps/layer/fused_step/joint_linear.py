"""Several linear layers of one input as one, LoRA included: one product forward, one for all gradients backward.

PEFT computes each layer, then A and B one after the other, a factor and a sum (peft/tuners/lora/layer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_mps.layer.fused_step import spans


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
        return tuple(spans.pieces(out, [len(each) for each in weights], -1))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        """Return its gradients; where they have to have gradients themselves, by operators that have."""
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
                parts = spans.pieces(whole.to(learned[0].dtype), sizes, 0) if wanted else [None] * len(sizes)
                grads += parts
        return tuple(each if need else None for each, need in zip(grads, ctx.needs_input_grad, strict=True))


def gradients(rows: Tensor, arriving: Tensor, weight: Tensor, asked: tuple[bool, bool, bool]) -> Any:
    """Return the gradients of a linear layer's input, weight and bias, of those that are `asked` for.

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
    """Return the rows of several parameters, as they lie."""
    found = spans.joined(parameters, 0)
    # They were brought together before; a hook of the program's may hand on copies.
    return torch.cat([each.detach() for each in parameters]) if found is None else found


def together(upstream: Sequence[Tensor | None], sizes: Sequence[int], rows: Tensor) -> Tensor:
    """Return the gradients of all results as one tensor."""
    there = [each for each in upstream if each is not None]
    if len(there) == len(sizes):
        found = spans.joined(there, -1)
        if found is not None and found.is_contiguous():
            return found
    pairs = zip(upstream, sizes, strict=True)
    shape = rows.shape[:-1]
    return torch.cat([rows.new_zeros((*shape, size)) if each is None else each for each, size in pairs], -1)


def _differentiable(
    given: Tensor, dtype: torch.dtype, learned: Sequence[Tensor], count: int, upstream: Sequence[Tensor | None]
) -> Any:
    """Return the gradients as functions of everything, for gradients of gradients."""
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


@dataclass(frozen=True)
class Plan:
    """Which of the layers have adapters, how each is scaled, and the dtype to compute in."""

    adapted: tuple[int, ...]
    scales: tuple[float, ...]
    dtype: torch.dtype
    count: int
    """Of layers."""

    def split(self, learned: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
        """Weights, biases, those that take down and those that take up again."""
        adapters = len(learned) - 2 * len(self.adapted)
        middle = adapters + len(self.adapted)
        return learned[: self.count], learned[self.count : adapters], learned[adapters:middle], learned[middle:]


def simple(wrapped: Any) -> tuple[Tensor, Tensor, float] | None:
    """A, B and their factor of a layer of PEFT's that adds no more than their product to its own, or None."""
    kind = type(wrapped)
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear") or "forward" in vars(wrapped):
        return None
    names = [name for name in wrapped.active_adapters if name in wrapped.lora_A]
    if len(names) != 1 or wrapped.disable_adapters or wrapped.merged or names[0] in wrapped.lora_variant:
        return None
    down, up, drop = (each[names[0]] for each in (wrapped.lora_A, wrapped.lora_B, wrapped.lora_dropout))
    parts = (wrapped.base_layer, down, up, drop)
    # Nobody calls the parts then: what waits for their calls would wait in vain.
    watched = any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in parts)
    plain = {type(down), type(up)} == {nn.Linear} and down.bias is up.bias is None
    drops = type(drop) is not nn.Identity and not (type(drop) is nn.Dropout and (drop.p == 0 or not drop.training))
    ordinary = plain and type(down.weight) is type(up.weight) is nn.Parameter
    return None if watched or drops or not ordinary else (down.weight, up.weight, float(wrapped.scaling[names[0]]))


class JointAdapters(torch.autograd.Function):
    """What several layers with frozen weights make of (…, width), some of them with LoRA; side by side in memory."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, plan: Plan, *learned: Tensor) -> Any:
        """`learned` is what `Plan.split` takes apart."""
        weights, biases, downs, ups = plan.split(learned)
        with torch.autocast(given.device.type, enabled=False):
            rows, weight = given.to(plan.dtype), as_one(weights).to(plan.dtype)
            bias = as_one(biases).to(plan.dtype) if biases else None
            out = torch.nn.functional.linear(rows, weight, bias)
            down = as_one(downs).to(plan.dtype)
            few = torch.nn.functional.linear(rows, down)
            parts = spans.pieces(out, [len(each) for each in weights], -1)
            for place, scale, up, each in _each(plan, ups, few, downs):
                # Not addmm_: before macOS 26 a product between other columns is mis-written (guard sliced-products).
                _rows(parts[place]).add_(_rows(each).mm(up.to(plan.dtype).t()), alpha=scale)
        ctx.save_for_backward(given, rows, weight, down, few, *learned)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        """Return its gradients; where they have to have gradients themselves, by operators that have."""
        given, rows, weight, down, few, *learned = ctx.saved_tensors
        plan: Plan = ctx.plan
        weights, biases, downs, ups = plan.split(learned)
        with torch.autocast(given.device.type, enabled=False):
            if torch.is_grad_enabled():
                return _differentiable_adapters(given, plan, learned, upstream)
            sizes = [len(each) for each in weights]
            arriving = together(upstream, sizes, rows)
            parts = torch.split(arriving, sizes, -1)
            of_few: list[Tensor] = []
            of_ups: list[Tensor] = []
            for place, scale, up, each in _each(plan, ups, few, downs):
                back, of_up, _ = gradients(each, parts[place], up.to(plan.dtype), (True, True, False))
                of_few.append(back if scale == 1 else back.mul_(scale))
                of_ups.append((of_up if scale == 1 else of_up.mul_(scale)).to(up.dtype))
            whole = of_few[0] if len(of_few) == 1 else torch.cat(of_few, -1)
            asked = bool(ctx.needs_input_grad[0])
            of_rows, of_down, _ = gradients(rows, whole, down, (asked, True, False))
            if asked:
                of_rows = gradients(rows, arriving, weight, (True, False, False))[0].add_(of_rows)
                of_rows = of_rows.to(given.dtype)
            of_downs = spans.pieces(of_down.to(downs[0].dtype), [len(each) for each in downs], 0)
        frozen = [None] * (len(weights) + len(biases))
        found = (of_rows if asked else None, None, *frozen, *of_downs, *of_ups)
        return tuple(each if need else None for each, need in zip(found, ctx.needs_input_grad, strict=True))


def _each(plan: Plan, ups: Sequence[Tensor], few: Tensor, downs: Sequence[Tensor]) -> Any:
    """For each adapter its layer's place, its factor, its B, and what its A made."""
    return zip(plan.adapted, plan.scales, ups, torch.split(few, [len(each) for each in downs], -1), strict=True)


def _rows(tensor: Tensor) -> Tensor:
    """Return the same as a matrix: a view, as the rows of what lies side by side follow one another at one distance."""
    return tensor.view(-1, tensor.shape[-1])


def _differentiable_adapters(
    given: Tensor, plan: Plan, learned: Sequence[Tensor], upstream: Sequence[Tensor | None]
) -> Any:
    """Return the gradients as functions of everything, for gradients of gradients."""
    weights, biases, downs, ups = plan.split(learned)
    linear, rows = torch.nn.functional.linear, given.to(plan.dtype)
    shifts: list[Tensor | None] = [each.to(plan.dtype) for each in biases]
    shifts = shifts or [None] * len(weights)
    outs = [linear(rows, each.to(plan.dtype), shift) for each, shift in zip(weights, shifts, strict=True)]
    for place, scale, down, up in zip(plan.adapted, plan.scales, downs, ups, strict=True):
        outs[place] = outs[place] + linear(linear(rows, down.to(plan.dtype)), up.to(plan.dtype)) * scale
    return differentiated(given, 2, learned, outs, upstream)
