"""LayerNorm and RMSNorm, a dispatch forward and two backward, LayerNorm also with the sum before it and its dropout.

PyTorch has an MPSGraph for LayerNorm's gradient, compiled anew for each shape, and none for RMSNorm's, which it makes
of a dozen operators (aten/src/ATen/native/mps/operations/Normalization.mm, RMSNorm.mm).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.training_kernels.library import SIMDGROUP, Source, differentiated, drawn, kept, threshold, width
from hf_mps.metal.training_kernels.trial import Case, both_ways

SOURCE = Source("norms.metal", needs="random.metal")
WIDEST = 8 * 1024
"""Columns of a row: a thread keeps sums for eight, and a threadgroup has 1,024 threads at most."""
EPSILON = 1e-5
"""What trials take, and PyTorch's LayerNorm by default."""
DRAW = 0x1234_5678_9ABC_DEF0, 2**32 - 1_000
"""What they drop by."""
GROUPS = 128
"""Threadgroups of a backward pass, and rows of which a simdgroup makes one sum."""
SMALL = 2**19
"""Bytes that a Mac's GPU reads twice in the time of a dispatch."""


def layer_norm(given: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """As `torch.nn.functional.layer_norm` over the last dimension, differentiable as often as that.

    The tensors are as `library.ordinary` says; the last dimension has at most WIDEST elements.
    """
    return _norm(given, weight, bias, None, "layer_norm", epsilon)


def rms_norm(given: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As `torch.nn.functional.rms_norm` over the last dimension; see `layer_norm`."""
    return _norm(given, weight, None, None, "rms_norm", epsilon)


def norm_beside(name: str, epsilon: float, given: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the norm `name` ("layer_norm" or "rms_norm"), and `given` for whoever adds something to it.

    Two gradients arrive there then, and the norm's kernel adds them; see `layer_norm`.
    """
    found: tuple[Tensor, Tensor] = _norm(given, weight, bias, None, name, epsilon, beside=True)
    return found


def residual_norm(
    name: str, epsilon: float, dropout: float, given: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `norm_beside(dropout(given) + residual)`: the norm and the sum.

    Dropout draws from the device's generator, a number for each element.
    """
    return _joined(name, epsilon, dropout, drawn(given.numel()) if dropout else (0, 0), given, residual, weight, bias)


def _joined(
    name: str, epsilon: float, dropout: float, draw: tuple[int, int], given: Tensor, residual: Tensor, *weights: Any
) -> tuple[Tensor, Tensor]:
    weight, bias = (*weights, None)[:2]
    found: tuple[Tensor, Tensor] = _norm(given, weight, bias, residual, name, epsilon, dropout, draw, beside=True)
    return found


def _norm(*given: Any, beside: bool = False) -> Any:
    compute: Callable[..., Any] = _Norm.apply
    return compute(beside, *given)


class _Norm(torch.autograd.Function):
    """A norm, and with `beside` what it is made of, so that all gradients of that meet here."""

    @staticmethod
    def forward(
        ctx: Any, beside: bool, given: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *how: Any
    ) -> Any:
        name, epsilon, dropout, draw = (*how, 0.0, (0, 0))[:4]
        columns = given.shape[-1]
        rows, threads = given.numel() // columns, width(columns)
        found, total = torch.empty_like(given), given if residual is None else torch.empty_like(given)
        statistics = torch.empty(rows, 2, dtype=torch.float32, device=given.device)
        learned, biased = (weight, weight if bias is None else bias), int(bias is not None)
        if residual is None:
            SOURCE.kernel(name, given.dtype)(
                found, statistics, given, *learned, [columns, biased], epsilon,
                threads=rows * threads, group_size=threads, arg_casts={5: "int32"},
            )  # fmt: skip
        else:
            SOURCE.kernel(f"{name}_joined", given.dtype)(
                found, statistics, total, given, residual, *learned, draw,
                [columns, biased, threshold(dropout), 0], [epsilon, 1 / (1 - dropout)],
                threads=rows * threads, group_size=threads, arg_casts={8: "int32"},
            )  # fmt: skip
        ctx.save_for_backward(total, weight, bias, statistics)
        ctx.how = name, epsilon, dropout, draw
        ctx.set_materialize_grads(False)
        return (found, total) if beside else found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, beside: Tensor | None = None) -> Any:
        name, epsilon, dropout, draw = ctx.how
        if torch.is_grad_enabled() or upstream is None:
            of_total, of_weights = beside, [None, None]
            if upstream is not None:
                stock = functools.partial(_stock, name, epsilon)
                with torch.enable_grad():
                    arrived, *of_weights = differentiated(stock, ctx.saved_tensors[:3], upstream)
                of_total = arrived if beside is None else beside + arrived
            of_given = of_total
            if dropout and of_total is not None:
                of_given = of_total * kept(draw, dropout, of_total.shape, of_total.device) / (1 - dropout)
        else:
            of_total, of_given, *of_weights = _backward(ctx, upstream, beside)
        of_residual = of_total if ctx.needs_input_grad[4] else None
        return None, of_given, *of_weights, of_residual, *(None,) * (len(ctx.needs_input_grad) - 5)


def _backward(ctx: Any, upstream: Tensor, beside: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of what the norm is made of, of what dropout was given, of weight and bias."""
    total, weight, bias, statistics = ctx.saved_tensors
    name, _, dropout, draw = ctx.how
    columns = total.shape[-1]
    rows, threads = total.numel() // columns, width(columns)
    groups, learns = min(rows, GROUPS), any(ctx.needs_input_grad[2:4])
    of_total = torch.empty_like(total)
    of_given = torch.empty_like(total) if dropout else of_total
    of_weight, of_bias = (torch.empty_like(weight) if learns else of_total for _ in range(2))
    # Of a small tensor the sums are whole at once: it is read again, which takes less than another dispatch.
    small = total.nbytes <= SMALL and rows <= threads // SIMDGROUP * GROUPS
    pieces = -(-columns // SIMDGROUP) if learns and small else 0
    by_group = learns and not small
    sums = torch.empty(groups, columns, 2, dtype=torch.float32, device=total.device) if by_group else statistics
    SOURCE.kernel(f"{name}_backward", total.dtype)(
        of_total, of_given, of_weight, of_bias, sums, upstream.contiguous(),
        upstream if beside is None else beside.contiguous(), total, weight, statistics, draw,
        [rows, columns, groups, int(beside is not None), int(by_group), threshold(dropout)], 1 / (1 - dropout),
        threads=(groups + pieces) * threads, group_size=threads, arg_casts={11: "int32"},
    )  # fmt: skip
    if by_group:
        SOURCE.kernel("columns", weight.dtype)(
            of_weight, of_bias, sums, [groups, columns], threads=columns, arg_casts="int32"
        )
    return of_total, of_given, of_weight if learns else None, of_bias if learns and bias is not None else None


def _stock(name: str, epsilon: float, given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What PyTorch has below its composite `layer_norm` and `rms_norm`, which may be ours."""
    if name == "layer_norm":
        return torch.native_layer_norm(given, weight.shape, weight, bias, epsilon)[0]
    whole = given if given.dtype == torch.float64 else given.float()
    normed = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * normed.to(given.dtype)


def cases(name: str) -> Iterator[Case]:
    """Yield both passes over the hidden states of a small encoder and of a larger decoder."""
    draw = torch.Generator().manual_seed(0)
    residual, first = name == "residual-norm", "rms_norm" if name == "rms-norm" else "layer_norm"
    # A second gradient arrives where all is small.
    for kind, rows, columns, dtype in (
        (first, 256, 384, torch.float32),
        ("rms_norm" if residual else first, 512, 1024, torch.float32 if residual else torch.bfloat16),
    ):
        given, other, upstream = (torch.randn(rows, columns, generator=draw) for _ in range(3))
        weights = [torch.randn(columns, generator=draw) for _ in range(2 if kind == "layer_norm" else 1)]
        inputs = [given * 2 + 0.5, *([other] if residual else []), *weights, upstream]
        sides = (
            functools.partial(both_ways, functools.partial(each, kind, residual, rows == 256))
            for each in (_ours, _theirs)
        )
        label = f"{rows} x {columns}, {'dropout, ' * residual}{str(dtype).removeprefix('torch.')}"
        yield Case(label, [each.to(dtype) for each in inputs], *sides)


def _ours(kind: str, residual: bool, beside: bool, *given: Tensor) -> Tensor:
    if residual:
        found = _joined(kind, EPSILON, 0.1, DRAW, *given)
    else:
        found = norm_beside(kind, EPSILON, given[0], *(*given[1:], None)[:2])
    return found[0] + found[1] if beside else found[0]


def _theirs(kind: str, residual: bool, beside: bool, given: Tensor, *rest: Tensor) -> Tensor:
    total = given * kept(DRAW, 0.1, given.shape, given.device) / 0.9 + rest[0] if residual else given
    found = _stock(kind, EPSILON, total, *rest[residual:])
    return found + total if beside else found
