"""LayerNorm and RMSNorm, a dispatch forward and one or two backward, also with the sum before them and its dropout.

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
from hf_mps.metal.training_kernels.trial import Case, both_ways, case

SOURCE = Source("norms.metal", needs="random.metal")
WIDEST = 8 * 1024
"""Columns of a row: a thread keeps sums for eight, and a threadgroup has 1,024 threads at most."""
EPSILON = 1e-5
"""What trials take, and PyTorch's LayerNorm by default."""
# So near to 2**32 that a kernel which counts on in 32 bits is wrong.
DRAW = 0x1234_5678_9ABC_DEF0, 2**32 - 1_000
"""What they drop by."""
GROUPS = 128
"""Threadgroups of a backward pass, and rows of which a simdgroup makes one sum."""
SMALL = 2**19
"""Bytes that a Mac's GPU reads twice in the time of a dispatch."""


def normed(
    name: str,
    epsilon: float,
    given: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dropout: float = 0.0,
    draw: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a norm over the last dimension and what it is made of, differentiable as often as PyTorch's.

    `name` is "layer_norm" or "rms_norm", as in `torch.nn.functional`. The norm is made of `given`, or of the sum of a
    residual and what dropout leaves of `given`. Whoever adds something to that takes the second result: its gradient
    arrives at the norm's kernel then, which adds it. The tensors are as `library.ordinary` says, and the last
    dimension has at most WIDEST elements. Dropout draws a number for each element from the device's generator, if no
    `draw` is given.
    """
    compute: Callable[..., tuple[Tensor, Tensor]] = _Norm.apply
    draw = draw or (drawn(given.numel()) if dropout else (0, 0))
    return compute(given, weight, bias, residual, name, epsilon, dropout, draw)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor]:
        residual, name, epsilon, dropout, draw = rest
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
        # A gradient that does not arrive stays None, where autograd would make zeros of it.
        ctx.set_materialize_grads(False)
        return found, total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, beside: Tensor | None) -> Any:
        name, epsilon, dropout, draw = ctx.how
        if torch.is_grad_enabled() or upstream is None:
            of_total, of_weight, of_bias = beside, None, None
            if upstream is not None:
                stock = functools.partial(_stock, name, epsilon)
                arrived, of_weight, of_bias = differentiated(stock, ctx.saved_tensors[:3], upstream)
                of_total = arrived if beside is None else beside + arrived
            of_given = of_total
            if dropout and of_total is not None:
                of_given = of_total * kept(draw, dropout, of_total.shape, of_total.device) / (1 - dropout)
        else:
            of_total, of_given, of_weight, of_bias = _backward(ctx, upstream, beside)
        of_residual = of_total if ctx.needs_input_grad[3] else None
        return of_given, of_weight, of_bias, of_residual, None, None, None, None


def _backward(ctx: Any, upstream: Tensor, beside: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of what the norm is made of, of what dropout was given, of weight and bias."""
    total, weight, bias, statistics = ctx.saved_tensors
    name, _, dropout, draw = ctx.how
    columns = total.shape[-1]
    rows, threads = total.numel() // columns, width(columns)
    groups, learns = min(rows, GROUPS), any(ctx.needs_input_grad[1:3])
    # What is not wanted is any tensor.
    of_total, of_given = torch.empty_like(total), torch.empty_like(total) if dropout else weight
    of_weight, of_bias = (torch.empty_like(weight) if learns else weight for _ in range(2))
    # Of a small tensor the sums are whole at once: it is read again, which takes less than another dispatch.
    small = total.nbytes <= SMALL and rows <= threads // SIMDGROUP * GROUPS
    pieces = -(-columns // SIMDGROUP) if learns and small else 0
    by_group = learns and not small
    sums = torch.empty(groups, columns, 2, dtype=torch.float32, device=total.device) if by_group else statistics
    SOURCE.kernel(f"{name}_backward", total.dtype)(
        of_total, of_given, of_weight, of_bias, sums, upstream.contiguous(),
        weight if beside is None else beside.contiguous(), total, weight, statistics, draw,
        [rows, columns, groups, int(beside is not None), int(by_group), threshold(dropout)], 1 / (1 - dropout),
        threads=(groups + pieces) * threads, group_size=threads, arg_casts={11: "int32"},
    )  # fmt: skip
    if by_group:
        SOURCE.kernel("columns", weight.dtype)(
            of_weight, of_bias, sums, [groups, columns], threads=columns, arg_casts="int32"
        )
    learned = (of_weight, None if bias is None else of_bias) if learns else (None, None)
    return of_total, of_given if dropout else of_total, *learned


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
        how = kind, residual, rows == 256
        sides = (functools.partial(both_ways, functools.partial(each, *how)) for each in (_ours, _theirs))
        yield case(f"{rows} x {columns}{', dropout' * residual}", inputs, dtype, *sides)


def _ours(kind: str, residual: bool, beside: bool, given: Tensor, *rest: Tensor) -> Tensor:
    weight, *bias = rest[residual:]
    how = (rest[0], 0.1, DRAW) if residual else ()
    found, total = normed(kind, EPSILON, given, weight, bias[0] if bias else None, *how)
    return found + total if beside else found


def _theirs(kind: str, residual: bool, beside: bool, given: Tensor, *rest: Tensor) -> Tensor:
    total = given * kept(DRAW, 0.1, given.shape, given.device) / 0.9 + rest[0] if residual else given
    found = _stock(kind, EPSILON, total, *rest[residual:])
    return found + total if beside else found
