"""LoRA of several linear layers of one input: one product for the layers, one for all that is taken down.

PEFT computes each layer, then A and B one after the other, a factor and a sum (peft/tuners/lora/layer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hf_mps.layer.fused_step import joint_linear, side_by_side


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
            rows, weight = given.to(plan.dtype), joint_linear.as_one(weights).to(plan.dtype)
            bias = joint_linear.as_one(biases).to(plan.dtype) if biases else None
            out = torch.nn.functional.linear(rows, weight, bias)
            down = joint_linear.as_one(downs).to(plan.dtype)
            few = torch.nn.functional.linear(rows, down)
            parts = side_by_side.pieces(out, [len(each) for each in weights], -1)
            for place, scale, up, each in _each(plan, ups, few, downs):
                # Not addmm_: before macOS 26 a product between other columns is mis-written (guard sliced-products).
                _rows(parts[place]).add_(_rows(each).mm(up.to(plan.dtype).t()), alpha=scale)
        ctx.save_for_backward(given, rows, weight, down, few, *learned)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        """Its gradients; where they have to have gradients themselves, by operators that have."""
        given, rows, weight, down, few, *learned = ctx.saved_tensors
        plan: Plan = ctx.plan
        weights, biases, downs, ups = plan.split(learned)
        with torch.autocast(given.device.type, enabled=False):
            if torch.is_grad_enabled():
                return _differentiable(given, plan, learned, upstream)
            sizes = [len(each) for each in weights]
            arriving = joint_linear.together(upstream, sizes, rows)
            parts = torch.split(arriving, sizes, -1)
            of_few: list[Tensor] = []
            of_ups: list[Tensor] = []
            for place, scale, up, each in _each(plan, ups, few, downs):
                back, of_up, _ = joint_linear.gradients(each, parts[place], up.to(plan.dtype), (True, True, False))
                of_few.append(back if scale == 1 else back.mul_(scale))
                of_ups.append((of_up if scale == 1 else of_up.mul_(scale)).to(up.dtype))
            whole = of_few[0] if len(of_few) == 1 else torch.cat(of_few, -1)
            asked = bool(ctx.needs_input_grad[0])
            of_rows, of_down, _ = joint_linear.gradients(rows, whole, down, (asked, True, False))
            if asked:
                of_rows = joint_linear.gradients(rows, arriving, weight, (True, False, False))[0].add_(of_rows)
                of_rows = of_rows.to(given.dtype)
            of_downs = side_by_side.pieces(of_down.to(downs[0].dtype), [len(each) for each in downs], 0)
        frozen = [None] * (len(weights) + len(biases))
        found = (of_rows if asked else None, None, *frozen, *of_downs, *of_ups)
        return tuple(each if need else None for each, need in zip(found, ctx.needs_input_grad, strict=True))


def _each(plan: Plan, ups: Sequence[Tensor], few: Tensor, downs: Sequence[Tensor]) -> Any:
    """For each adapter its layer's place, its factor, its B, and what its A made."""
    return zip(plan.adapted, plan.scales, ups, torch.split(few, [len(each) for each in downs], -1), strict=True)


def _rows(tensor: Tensor) -> Tensor:
    """The same as a matrix: a view, as the rows of what lies side by side follow one another at one distance."""
    return tensor.view(-1, tensor.shape[-1])


def _differentiable(given: Tensor, plan: Plan, learned: Sequence[Tensor], upstream: Sequence[Tensor | None]) -> Any:
    """The gradients as functions of everything, for gradients of gradients."""
    weights, biases, downs, ups = plan.split(learned)
    linear, rows = torch.nn.functional.linear, given.to(plan.dtype)
    shifts: list[Tensor | None] = [each.to(plan.dtype) for each in biases]
    shifts = shifts or [None] * len(weights)
    outs = [linear(rows, each.to(plan.dtype), shift) for each, shift in zip(weights, shifts, strict=True)]
    for place, scale, down, up in zip(plan.adapted, plan.scales, downs, ups, strict=True):
        outs[place] = outs[place] + linear(linear(rows, down.to(plan.dtype)), up.to(plan.dtype)) * scale
    return joint_linear.differentiated(given, 2, learned, outs, upstream)
