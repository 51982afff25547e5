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

from hf_mps.metal.training_kernels.library import Source, differentiated, drawn, kept, threshold, width
from hf_mps.metal.training_kernels.trial import Case, both_ways

SOURCE = Source("norms.metal", needs="random.metal")
WIDEST = 8 * 1024
"""Columns of a row: a thread keeps sums for eight, and a threadgroup has 1,024 threads at most."""
EPSILON = 1e-5
"""What trials take, and PyTorch's LayerNorm by default."""
GROUPS = 128
"""Threadgroups of a backward pass; each leaves a row of sums for the weight."""


def layer_norm(given: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """As `torch.nn.functional.layer_norm` over the last dimension, differentiable as often as that.

    The tensors are as `library.ordinary` says; the last dimension has at most WIDEST elements.
    """
    compute: Callable[..., Tensor] = _Norm.apply
    return compute(given, weight, bias, epsilon, "layer_norm")


def rms_norm(given: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As `torch.nn.functional.rms_norm` over the last dimension; see `layer_norm`."""
    compute: Callable[..., Tensor] = _Norm.apply
    return compute(given, weight, None, epsilon, "rms_norm")


class _Norm(torch.autograd.Function):
    """`name` is that of the kernel, and of PyTorch's function."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, name: str) -> Tensor:
        columns = given.shape[-1]
        rows, threads = given.numel() // columns, width(columns)
        found = torch.empty_like(given)
        statistics = torch.empty(rows, 2, dtype=torch.float32, device=given.device)
        sizes = [columns, int(bias is not None)]
        SOURCE.kernel(name, given.dtype)(
            found, statistics, given, weight, weight if bias is None else bias, sizes, epsilon,
            threads=rows * threads, group_size=threads, arg_casts={5: "int32"},
        )  # fmt: skip
        ctx.save_for_backward(given, weight, bias, statistics)
        ctx.epsilon, ctx.name = epsilon, name
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        given, weight, bias, statistics = ctx.saved_tensors
        if torch.is_grad_enabled():
            stock = functools.partial(_stock, ctx.name, ctx.epsilon)
            return *differentiated(stock, (given, weight, bias), upstream), None, None
        columns = given.shape[-1]
        rows, threads = given.numel() // columns, width(columns)
        groups, learns = min(rows, GROUPS), any(ctx.needs_input_grad[1:3])
        of_given = torch.empty_like(given)
        sums = torch.empty(groups if learns else 1, columns, 2, dtype=torch.float32, device=given.device)
        SOURCE.kernel(f"{ctx.name}_backward", given.dtype)(
            of_given, sums, upstream.contiguous(), given, weight, statistics, [rows, columns, groups, int(learns)],
            threads=groups * threads, group_size=threads, arg_casts="int32",
        )  # fmt: skip
        return of_given, *_of_weights(weight, bias, sums, learns), None, None


def _of_weights(weight: Tensor, bias: Tensor | None, sums: Tensor, learns: bool) -> tuple[Tensor | None, ...]:
    """Return the gradients of weight and bias, from the sums of each threadgroup."""
    if not learns:
        return None, None
    of_weight, of_bias = torch.empty_like(weight), torch.empty_like(weight)
    SOURCE.kernel("columns", weight.dtype)(
        of_weight, of_bias, sums, [len(sums), weight.numel()], threads=weight.numel(), arg_casts="int32"
    )
    return of_weight, None if bias is None else of_bias


def residual_norm(
    given: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float, dropout: float = 0.0
) -> Tensor:
    """As `layer_norm(dropout(given) + residual)`, differentiable as often as that; see `layer_norm`.

    Dropout draws from the device's generator, a number for each element.
    """
    draw = drawn(given.numel()) if dropout else (0, 0)
    return _joined(given, residual, weight, bias, epsilon, dropout, draw)


def _joined(given: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Tensor:
    compute: Callable[..., tuple[Tensor, Tensor]] = _ResidualNorm.apply
    return compute(given, residual, weight, bias, *how)[0]


class _ResidualNorm(torch.autograd.Function):
    """Returns the sum too, so that gradients of gradients find their way from it to what it was made of."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        weight, bias, epsilon, dropout, draw = rest
        columns = given.shape[-1]
        rows, threads = given.numel() // columns, width(columns)
        found, total = torch.empty_like(given), torch.empty_like(given)
        statistics = torch.empty(rows, 2, dtype=torch.float32, device=given.device)
        factor = 1 / (1 - dropout)
        SOURCE.kernel("joined", given.dtype)(
            found, statistics, total, given, residual, weight, weight if bias is None else bias, draw,
            [columns, int(bias is not None), threshold(dropout), 0], [epsilon, factor],
            threads=rows * threads, group_size=threads, arg_casts={8: "int32"},
        )  # fmt: skip
        ctx.save_for_backward(total, weight, bias, statistics)
        ctx.how = epsilon, dropout, draw, factor
        ctx.set_materialize_grads(False)
        return found, total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, of_total: Tensor | None) -> Any:
        total, weight, bias, statistics = ctx.saved_tensors
        epsilon, dropout, draw, factor = ctx.how
        if torch.is_grad_enabled() or of_total is not None or upstream is None:
            of_weight = of_bias = None
            if upstream is not None:
                stock = functools.partial(_stock, "layer_norm", epsilon)
                with torch.enable_grad():
                    arrived, of_weight, of_bias = differentiated(stock, (total, weight, bias), upstream)
                of_total = arrived if of_total is None else of_total + arrived
            if of_total is None:
                return (None,) * 7
            mask = kept(draw, dropout, total.shape, total.device)
            return of_total * mask * factor, of_total, of_weight, of_bias, None, None, None
        columns = total.shape[-1]
        rows, threads = total.numel() // columns, width(columns)
        groups, learns = min(rows, GROUPS), any(ctx.needs_input_grad[2:4])
        of_residual = torch.empty_like(total)
        of_given = torch.empty_like(total)
        sums = torch.empty(groups if learns else 1, columns, 2, dtype=torch.float32, device=total.device)
        SOURCE.kernel("joined_backward", total.dtype)(
            of_residual, of_given, sums, upstream.contiguous(), total, weight, statistics, draw,
            [rows, columns, groups, int(learns)], threshold(dropout), factor,
            threads=groups * threads, group_size=threads, arg_casts={8: "int32", 9: "int32"},
        )  # fmt: skip
        return of_given, of_residual, *_of_weights(weight, bias, sums, learns), None, None, None


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
    if name == "residual-norm":
        draws = 0x1234_5678_9ABC_DEF0, 2**32 - 1_000
        inputs = [torch.randn(*size, generator=draw) for size in ((256, 384), (256, 384), (384,), (384,), (256, 384))]

        def joined(given: Tensor, *others: Tensor) -> Tensor:
            residual, weight, bias = others
            return _joined(given, residual, weight, bias, EPSILON, 0.1, draws)

        def apart(given: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            mask = kept(draws, 0.1, given.shape, given.device)
            return _stock("layer_norm", EPSILON, given * mask / 0.9 + residual, weight, bias)

        both = functools.partial(both_ways, joined), functools.partial(both_ways, apart)
        yield Case("256 x 384, dropout, float32", inputs, *both)
        return
    norm: Callable[..., Tensor] = layer_norm if name == "layer-norm" else rms_norm
    ours = functools.partial(both_ways, functools.partial(norm, epsilon=EPSILON))
    stock = functools.partial(both_ways, functools.partial(_stock, name.replace("-", "_"), EPSILON))
    for rows, columns, dtype in ((256, 384, torch.float32), (512, 1024, torch.bfloat16)):
        given, upstream = (torch.randn(rows, columns, generator=draw) for _ in range(2))
        weights = [torch.randn(columns, generator=draw) for _ in range(2 if name == "layer-norm" else 1)]
        inputs = [each.to(dtype) for each in (given * 2 + 0.5, *weights, upstream)]
        yield Case(f"{rows} x {columns}, {str(dtype).removeprefix('torch.')}", inputs, ours, stock)
