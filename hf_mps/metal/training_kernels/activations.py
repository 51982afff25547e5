"""GELU behind a bias, and gated linear units as Llama's, a dispatch each way; two and two of PyTorch's, two and four.

The gradient of a bias is summed where the activation's is made. Between the factors of a gated unit nothing is rounded
or kept, so that a layer of width n holds n numbers less for each place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from hf_mps.metal.training_kernels.library import SIMDGROUP, TYPES, Source, differentiated, width
from hf_mps.metal.training_kernels.trial import Case, both_ways, case

SOURCE = Source("activations.metal")
WRITTEN_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": gelu,
    "tanh": functools.partial(gelu, approximate="tanh"),
    "silu": silu,
    "quick": lambda given: given * torch.sigmoid(1.702 * given),
}
"""The activations that the kernels know, and PyTorch's way to them; `quick` is CLIP's."""


def activated(given: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Return the activation `kind` (a key of WRITTEN_OUT) of `given + bias`, differentiable as often as asked.

    `given` (…, columns) and `bias` (columns) are as `library.ordinary` says.
    """
    compute: Callable[..., Tensor] = _Activation.apply
    return compute(given, bias, kind)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        found = torch.empty_like(given)
        SOURCE.kernel(f"forward_{kind}", given.dtype)(
            found, given, given if bias is None else bias, [given.shape[-1], int(bias is not None)],
            threads=given.numel(), arg_casts="int32",
        )  # fmt: skip
        ctx.save_for_backward(given, bias)
        ctx.kind = kind
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        given, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiated(functools.partial(_shifted, kind=ctx.kind), (given, bias), upstream), None
        of_given, of_bias = torch.empty_like(given), None if bias is None else torch.empty_like(bias)
        # Without a sum all is one row, a simdgroup for each of its pieces.
        rows, columns = (1, given.numel()) if bias is None else (given.numel() // bias.numel(), bias.numel())
        threads = width(rows * SIMDGROUP)
        SOURCE.kernel(f"backward_{ctx.kind}", given.dtype)(
            of_given, of_given if of_bias is None else of_bias, upstream.contiguous(), given,
            given if bias is None else bias, [rows, columns, int(bias is not None), 0],
            threads=-(-columns // SIMDGROUP) * threads, group_size=threads, arg_casts="int32",
        )  # fmt: skip
        return of_given, of_bias, None


def _shifted(given: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return WRITTEN_OUT[kind](given if bias is None else given + bias)


def takes(gate: Tensor, up: Tensor) -> bool:
    """Return whether `gated` has a kernel for these."""
    alike = (gate.shape, gate.dtype, gate.device) == (up.shape, up.dtype, up.device)
    return alike and gate.dtype in TYPES and 0 < gate.numel() < 2**31


def gated(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Return the activation `kind` of `gate`, times `up` of its shape (…, columns), differentiable as often as asked.

    Of two that lie side by side in each row, as one product makes them, the gradients do so too.
    """
    compute: Callable[..., Tensor] = _Gated.apply
    return compute(gate, up, kind)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        rows = [_rows(each) for each in (gate, up)]
        found = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        SOURCE.kernel(f"gated_{kind}", gate.dtype)(
            # The struct's last two strides are the gradients', which this kernel does not read.
            found, *rows, [gate.shape[-1], *(each.stride(0) for each in rows), 0, 0],
            threads=gate.numel(), arg_casts="int32",
        )  # fmt: skip
        ctx.save_for_backward(gate, up)
        ctx.kind = kind
        return found

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *differentiated(functools.partial(_product, kind=ctx.kind), (gate, up), upstream), None
        rows = [_rows(each) for each in (gate, up)]
        count, columns = rows[0].shape
        if rows[0].stride(0) == rows[1].stride(0) == 2 * columns:
            found = torch.split(upstream.new_empty(count, 2 * columns), columns, 1)
        else:
            found = upstream.new_empty(count, columns), upstream.new_empty(count, columns)
        SOURCE.kernel(f"gated_backward_{ctx.kind}", gate.dtype)(
            *found, upstream.contiguous(), *rows, [columns, *(each.stride(0) for each in (*rows, *found))],
            threads=gate.numel(), arg_casts="int32",
        )  # fmt: skip
        return *(each.view(gate.shape) for each in found), None


def _rows(given: Tensor) -> Tensor:
    """Return it as (rows, columns), the columns side by side."""
    found = given.reshape(-1, given.shape[-1])
    return found if found.stride(1) == 1 else found.contiguous()


def _product(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return WRITTEN_OUT[kind](gate) * up


def cases(name: str) -> Iterator[Case]:
    """Yield both ways of a layer and its activation in a small encoder, or of what a decoder's two layers make."""
    draw = torch.Generator().manual_seed(0)
    ways: Sequence[Callable[..., Tensor]] = (_dense, _dense_written_out) if name == "gelu" else (gated, _product)
    first = "gelu" if name == "gelu" else "silu"
    for kind, dtype in ((first, torch.float32), ("tanh", torch.float32), (first, torch.bfloat16)):
        inputs = [torch.randn(512, 384, generator=draw) for _ in range(3)]
        if name == "gelu":
            rows, weight, bias = (torch.randn(size, generator=draw) for size in ((512, 96), (384, 96), (384,)))
            inputs = [rows, weight * 96**-0.5, bias, inputs[-1]]
        sides = (functools.partial(both_ways, functools.partial(each, kind=kind)) for each in ways)
        yield case(f"512 x 384, {kind}", inputs, dtype, *sides)


def _dense(given: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
    return activated(linear(given, weight), bias, kind)


def _dense_written_out(given: Tensor, weight: Tensor, bias: Tensor, kind: str) -> Tensor:
    return WRITTEN_OUT[kind](linear(given, weight, bias))
