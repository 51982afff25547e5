"""Matrix products by Metal kernels: integers, what MPSGraph computes wrongly, and all where the user prefers Metal.

All facts are of operations/LinearAlgebra.mm. Every other product is one MPSGraph, on a Mac with macOS 14.4 or later.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import MISFIT, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, i32, i64, padded, u32, u64

SOURCE = "operations/LinearAlgebra.mm"
TILE = 16
"""Rows and columns of the result that a threadgroup computes."""
LONGEST_COMPLEX = 2048
"""Inner size of complex matrices up to which MPSGraph's product is right (pytorch#167727)."""
_SHORT, _PADDING = 16, 15
"""Rows or columns, and elements between rows, from which MPSGraph's half products read too much (pytorch#178056)."""


def wants_metal(first: Tensor, second: Tensor) -> bool:
    """Whether the host gives the product of two matrices to a Metal kernel (use_metal_mm)."""
    dtype = first.dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return True
    if dtype.is_complex and first.shape[1] > LONGEST_COMPLEX:
        return True
    return "PYTORCH_MPS_PREFER_METAL" in os.environ or (dtype == torch.float16 and _overflows(first, second))


def _overflows(first: Tensor, second: Tensor) -> bool:
    if first.shape[0] > _SHORT and second.shape[1] > _SHORT:
        return False
    if first.stride(1) != 1 or second.stride(0) != 1:
        return False
    gaps = (first.stride(0) - first.shape[1], second.stride(1) - second.shape[0])
    return any(gap > _PADDING or gap % 4 for gap in gaps)


def _check_metals(release: Release, first: Tensor, second: Tensor) -> None:
    """Raises NoRule where no kernel of this file takes the product.

    From 2.14 on the host asks its vector kernels first (try_mps_gemv), for all floating-point dtypes.
    """
    if first.dtype.is_floating_point and "gemv_t2d_float_16_4_ab" in release:
        raise NoRule("MPSGraph, or a vector kernel that has no rule")
    if not wants_metal(first, second):
        raise NoRule("MPSGraph on this release")


@rule("mm", "mm.out", source=SOURCE)
def mm(release: Release, first: Tensor, second: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The product of two matrices."""
    shape = _shape(first, second, 2)
    _check_metals(release, first, second)
    return _mm(release, first, second, _output(first, shape, out))


@rule("addmm", "addmm.out", source=SOURCE)
def addmm(
    release: Release,
    bias: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    out: Tensor | None = None,
) -> Tensor:
    """`beta * bias + alpha * first @ second`."""
    shape = _shape(first, second, 2)
    _check_metals(release, first, second)
    output = _output(first, shape, out)
    if isinstance(beta, float) and isinstance(alpha, float) and beta == 0 and alpha == 1:
        return _mm(release, first, second, output)
    return _launch(release, "addmm", [first, second, output], (_bias(bias, first, shape), alpha, beta))


@rule("bmm", "bmm.out", source=SOURCE)
def bmm(release: Release, first: Tensor, second: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The products of two batches of matrices: of integers alone by Metal."""
    shape = _shape(first, second, 3)
    if first.dtype.is_floating_point or first.dtype.is_complex:
        raise NoRule("MPSGraph on this release")
    output = _output(first, shape, out)
    if first.numel() == 0 or second.numel() == 0:
        return output.zero_()
    return _launch(release, "naive_bmm", [first, second, output])


@rule("baddbmm", "baddbmm.out", source=SOURCE)
def baddbmm(
    release: Release,
    bias: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    out: Tensor | None = None,
) -> Tensor:
    """`beta * bias + alpha * first @ second` for each matrix of the batches: of integers and complex numbers."""
    shape = _shape(first, second, 3)
    if first.dtype.is_floating_point:
        raise NoRule("MPSGraph on this release")
    output = _output(first, shape, out)
    return _launch(release, "naive_baddbmm", [first, second, output], (_bias(bias, first, shape), alpha, beta))


@rule("addbmm", "addbmm.out", source=SOURCE)
def addbmm(
    release: Release,
    bias: Tensor,
    first: Tensor,
    second: Tensor,
    *,
    beta: complex = 1,
    alpha: complex = 1,
    out: Tensor | None = None,
) -> Tensor:
    """`beta * bias + alpha *` the sum of `first @ second` over the batch: of integers and complex numbers."""
    shape = _shape(first, second, 3)[1:]
    if first.dtype.is_floating_point:
        raise NoRule("MPSGraph on this release")
    output = _output(first, shape, out)
    if first.shape[0] == 0:
        return output.zero_()
    return _launch(release, "naive_addbmm", [first, second, output], (_bias(bias, first, shape), alpha, beta))


def _into_bias(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same product into its bias."""

    def into_bias(release: Release, bias: Tensor, *matrices: Tensor, **scales: complex) -> Tensor:
        return function(release, bias, *matrices, out=bias, **scales)

    return into_bias


for _operator, _function in (("addmm_", addmm), ("baddbmm_", baddbmm), ("addbmm_", addbmm)):
    rule(_operator, source=SOURCE)(_into_bias(_function))


def _mm(release: Release, first: Tensor, second: Tensor, output: Tensor) -> Tensor:
    return _launch(release, "matmul", [first, second, output])


def _launch(
    release: Release, name: str, three: list[Tensor], scaled: tuple[Tensor, complex, complex] | None = None
) -> Tensor:
    """A threadgroup for TILE x TILE elements of the result; `scaled` is what is added, alpha and beta.

    Two dimensions are bound with rows first, three with columns first; the kernel of a sum over the batch walks it.
    """
    output = three[2]
    if output.numel() == 0:
        return output
    first, second = (each.resolve_conj() for each in three[:2])
    bound = [first, second, output]
    batches = first.shape[0] if first.dim() == 3 else None
    arguments: dict[str, Tensor | bytes] = {"mat1Data": first, "mat2Data": second, "outputData": output}
    if scaled is not None:
        bias, alpha, beta = scaled
        bound.append(bias.resolve_conj())
        arguments |= {"biasData": bound[-1], "alpha_beta": _scales(alpha, beta, output.dtype)}
    order = (lambda each: each.stride()) if batches is None else _columns_first
    sizes = u32(first.shape[-2:], output.shape[-1], *(() if batches is None else (batches,)))
    arguments |= {"strides": u64(*map(order, bound)), "sizes": padded(sizes, 16)}
    across, down = -(-output.shape[-1] // TILE), -(-first.shape[-2] // TILE)
    deep = output.shape[0] if output.dim() == 3 else 1
    kernel = release.kernel(f"{name}_{metal(output.dtype)}")
    kernel.launch(arguments, groups=(across, down, deep), group=(TILE, TILE, 1))
    return output


def _columns_first(given: Tensor) -> tuple[int, int, int]:
    """Strides of columns, rows and batches; a result without a batch has its rows' in that place, which none reads."""
    return given.stride(-1), given.stride(-2), given.stride(0)


def _scales(alpha: complex, beta: complex, dtype: torch.dtype) -> bytes:
    """Two numbers as the kernels compute: 64-bit integers for their own, else 32 bits, floats, or complex floats."""
    if dtype == torch.int64:
        return i64(int(alpha.real), int(beta.real))
    if dtype.is_complex:
        return f32(alpha.real, alpha.imag, beta.real, beta.imag)
    return f32(alpha.real, beta.real) if dtype.is_floating_point else i32(int(alpha.real), int(beta.real))


def _shape(first: Tensor, second: Tensor, dimensions: int) -> tuple[int, ...]:
    """The shape of the product. Raises NoRule where PyTorch refuses the arguments."""
    fits = first.dim() == second.dim() == dimensions and first.dtype == second.dtype
    if not fits or first.shape[-1] != second.shape[-2] or first.shape[:-2] != second.shape[:-2]:
        raise NoRule("PyTorch refuses the arguments")
    return (*first.shape[:-1], second.shape[-1])


def _output(like: Tensor, shape: tuple[int, ...], out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    if out.shape != shape or out.dtype != like.dtype or out.is_conj():
        raise NoRule(MISFIT)
    return out


def _bias(bias: Tensor, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    if bias.dtype != like.dtype:
        raise NoRule("PyTorch refuses the arguments")
    try:
        return bias.expand(shape)
    except RuntimeError:
        raise NoRule("PyTorch refuses the arguments") from None
