"""Products of matrices, and factors: Cholesky's and QR.

Every other product is one MPSGraph, on a Mac with macOS 14.4 or later; LU, solving and inverses are MPSMatrix's up to
2.13, and no Metal kernels of PyTorch's.
"""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.copies import expanded
from hf_mps.metal.kernels.rules import GRAPH, MISFIT, by_meta, kernels, refuse, rule
from hf_mps.metal.kernels.values import NoRule, f32, i32, i64, metal, padded, u32, u64
from hf_mps.metal.operators.launch_class import COMPLEX_INNER

# Host: operations/LinearAlgebra.mm.
TILE = 16
"""Rows and columns of the result that a threadgroup computes."""
_SHORT, _PADDING = 16, 15
"""Rows or columns, and elements between rows, from which MPSGraph's half products read too much (pytorch#178056)."""


def wants_metal(first: Tensor, second: Tensor) -> bool:
    """Return whether the host gives the product of two matrices to a Metal kernel (use_metal_mm)."""
    dtype = first.dtype
    if not dtype.is_floating_point and not dtype.is_complex:
        return True
    # MPSGraph's product of complex numbers is wrong beyond this inner size (pytorch#167727).
    if dtype.is_complex and first.shape[1] > COMPLEX_INNER:
        return True
    # PyTorch's own switch counts as on with any value, an empty one too (has_env).
    if "PYTORCH_MPS_PREFER_METAL" in os.environ:
        return True
    long = first.shape[0] > _SHORT and second.shape[1] > _SHORT
    if dtype != torch.float16 or long or first.stride(1) != 1 or second.stride(0) != 1:
        return False
    gaps = (first.stride(0) - first.shape[1], second.stride(1) - second.shape[0])
    return any(gap > _PADDING or gap % 4 for gap in gaps)


def _as_product(target: Tensor | None, *operands: Tensor, summed: bool = False, **_: Any) -> Tensor:
    """A product of two matrices, of two batches, or (`summed`) the sum of such a batch."""
    first, second = operands[-2:]
    fits = first.dim() == second.dim() in (2, 3) and first.dtype == second.dtype
    refuse(not fits or first.shape[-1] != second.shape[-2] or first.shape[:-2] != second.shape[:-2])
    # Before an output is made: nearly all products are MPSGraph's, and pay for this question alone.
    if first.dim() == 2:
        # From 2.14 on the host asks its vector kernels first (try_mps_gemv), for all floating-point dtypes.
        newer = first.dtype.is_floating_point and "gemv_t2d_float_16_4_ab" in kernels
        refuse(newer, "MPSGraph, or a vector kernel that has no rule")
        refuse(not wants_metal(first, second), GRAPH)
    else:
        refuse(first.dtype.is_floating_point or (first.dtype.is_complex and len(operands) == 2), GRAPH)
    shape = (*first.shape[:-1], second.shape[-1])[1 if summed else 0 :]
    if target is None:
        return torch.empty(shape, dtype=first.dtype, device=first.device)
    refuse(target.shape != shape or target.dtype != first.dtype or target.is_conj(), MISFIT)
    return target


@rule("mm", outputs=_as_product, kernel="matmul")
@rule("bmm", outputs=_as_product, kernel="naive_bmm")
def product(output: Tensor, first: Tensor, second: Tensor, *, kernel: str) -> None:
    """The product of two matrices, or of two batches of them: of integers alone by Metal."""
    if first.numel() == 0 or second.numel() == 0:
        output.zero_()
    else:
        _launch(kernel, [first, second, output])


@rule("addmm", outputs=_as_product, kernel="addmm")
@rule("baddbmm", outputs=_as_product, kernel="naive_baddbmm")
@rule("addbmm", outputs=partial(_as_product, summed=True), kernel="naive_addbmm")
def add_product(
    output: Tensor, bias: Tensor, first: Tensor, second: Tensor, *, kernel: str, beta: complex = 1, alpha: complex = 1
) -> None:
    """`beta * bias + alpha * first @ second`, for each matrix of a batch, or their sum: no floats of batches."""
    if kernel == "addmm" and isinstance(beta, float) and isinstance(alpha, float) and beta == 0 and alpha == 1:
        _launch("matmul", [first, second, output])
    elif kernel == "naive_addbmm" and first.shape[0] == 0:
        output.zero_()
    else:
        refuse(bias.dtype != first.dtype)
        _launch(kernel, [first, second, output], (expanded(bias, output), alpha, beta))


def _launch(name: str, three: list[Tensor], scaled: tuple[Tensor, complex, complex] | None = None) -> None:
    """A threadgroup for TILE x TILE elements of the result; `scaled` is what is added, alpha and beta.

    Two dimensions are bound with rows first, three with columns first; the kernel of a sum over the batch walks it.
    """
    output = three[2]
    if output.numel() == 0:
        return
    first, second = (each.resolve_conj() for each in three[:2])
    bound = [first, second, output]
    batches = first.shape[0] if first.dim() == 3 else None
    arguments: dict[str, Tensor | bytes] = {"mat1Data": first, "mat2Data": second, "outputData": output}
    if scaled is not None:
        bias, alpha, beta = scaled
        bound.append(bias.resolve_conj())
        arguments |= {"biasData": bound[-1], "alpha_beta": _scales(alpha, beta, output.dtype)}
    sizes, strides = u32(first.shape[-2:], output.shape[-1]), [each.stride() for each in bound]
    if batches is not None:
        # A result without a batch has its rows' stride in that place, which none reads.
        sizes, strides = sizes + u32(batches), [(each.stride(-1), each.stride(-2), each.stride(0)) for each in bound]
    arguments |= {"strides": u64(*strides), "sizes": padded(sizes, 16)}
    across, down = -(-output.shape[-1] // TILE), -(-first.shape[-2] // TILE)
    deep = output.shape[0] if output.dim() == 3 else 1
    kernels[f"{name}_{metal(output.dtype)}"].launch(arguments, groups=(across, down, deep), group=(TILE, TILE, 1))


def _scales(alpha: complex, beta: complex, dtype: torch.dtype) -> bytes:
    """Two numbers as the kernels compute: 64-bit integers for their own, else 32 bits, floats, or complex floats."""
    if dtype == torch.int64:
        return i64(int(alpha.real), int(beta.real))
    if dtype.is_complex:
        return f32(alpha.real, alpha.imag, beta.real, beta.imag)
    return f32(alpha.real, beta.real) if dtype.is_floating_point else i32(int(alpha.real), int(beta.real))


BLOCK = 32
"""Rows and columns of a block of Cholesky's factorisation."""
LARGEST_QR = 512
"""The lesser of rows and columns up to which the host factors on the GPU."""


@rule("linalg_cholesky_ex", outputs=by_meta)
def cholesky(outputs: tuple[Tensor, Tensor], given: Tensor, *, upper: bool = False, check_errors: bool = False) -> None:
    """Block by block: the diagonal block, the blocks below it, then all pairs of those."""
    factor, info = outputs
    refuse(given.dtype != torch.float32)
    side = "U" if upper else "L"
    diagonal, below, pairs = (kernels[f"{name}{side}"] for name in ("factorDiagonalBlock", "applyTRSM", "applySYRK"))
    info.zero_()
    if factor.numel() == 0:
        return
    if not (factor.mT.is_contiguous() and info.is_contiguous()):
        # PyTorch's structured operators compute into tensors of the strides that the kernel reads, then copy.
        found = torch.linalg.cholesky_ex(given, upper=upper, check_errors=check_errors)
        factor.copy_(found[0])
        info.copy_(found[1])
        return
    factor.copy_(given)
    size = given.shape[-1]
    batches, block = math.prod(given.shape[:-2]), min(BLOCK, size)
    count = -(-size // block)
    for at in range(count):
        left = count - at - 1
        sizes = {"N": u32(size), "NB": u32(block), "k": u32(at)}
        group = (32, 8, 1)
        diagonal.launch({"A": factor, "info": info, **sizes}, groups=(batches, 1, 1), group=group)
        if left:
            below.launch({"A": factor, **sizes}, groups=(batches, left, 1), group=group)
            pairs.launch({"A": factor, **sizes}, groups=(batches, left * (left + 1) // 2, 1), group=group)
    # The kernels write one triangle, and the other still holds what was given.
    (factor.triu_ if upper else factor.tril_)()
    if check_errors:
        torch.ops.aten._linalg_check_errors(info, "linalg.cholesky_ex", is_matrix=given.dim() == 2)


@rule("linalg_qr", outputs=by_meta)
def qr(outputs: tuple[Tensor, Tensor], given: Tensor, mode: str = "reduced") -> None:
    """Reflections by one threadgroup a matrix; the whole factors are computed, then cut."""
    orthogonal, upper = outputs
    rows, columns = given.shape[-2:]
    refuse(given.dtype != torch.float32 or mode == "r")
    if min(rows, columns) > LARGEST_QR or given.numel() == 0:
        raise NoRule("nothing to factor, or a matrix that the host factors on the CPU")
    kernel = kernels[f"linalg_qr_householder_{metal(given.dtype)}"]
    batches = math.prod(given.shape[:-2])
    info = torch.zeros(1, dtype=torch.int32, device=given.device)
    whole = {"Q": given.new_empty((batches, rows, rows)), "R": given.new_empty((batches, rows, columns))}
    # The kernel works in the copy's memory.
    copy = given.reshape(batches, rows, columns).clone(memory_format=torch.contiguous_format)
    arguments = {"A": copy, **whole, "info": info, "params": u32(rows, columns)}
    kernel.launch({**arguments, "v_work": given.new_empty((batches, rows))}, groups=batches, group=1024)
    refuse(info.item(), "the kernel reports a failure")
    orthogonal.copy_(whole["Q"][..., : orthogonal.shape[-1]].reshape(orthogonal.shape))
    upper.copy_(whole["R"][:, : upper.shape[-2]].reshape(upper.shape))
