"""Products of matrices, also with weights of four and eight bits, and factors: Cholesky's, QR, LU unpacked.

Every other product is one MPSGraph, on a Mac with macOS 14.4 or later; LU, solving and inverses are MPSMatrix's up to
2.13, and no Metal kernels of PyTorch's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
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
    if dtype.is_complex and first.shape[1] > COMPLEX_INNER:
        return True
    if "PYTORCH_MPS_PREFER_METAL" in os.environ:
        return True
    long = first.shape[0] > _SHORT and second.shape[1] > _SHORT
    if dtype != torch.float16 or long or first.stride(1) != 1 or second.stride(0) != 1:
        return False
    gaps = (first.stride(0) - first.shape[1], second.stride(1) - second.shape[0])
    return any(gap > _PADDING or gap % 4 for gap in gaps)


def _check_metals(first: Tensor, second: Tensor) -> None:
    """Raise NoRule where no kernel of this file takes the product.

    From 2.14 on the host asks its vector kernels first (try_mps_gemv), for all floating-point dtypes.
    """
    if first.dtype.is_floating_point and "gemv_t2d_float_16_4_ab" in kernels:
        raise NoRule("MPSGraph, or a vector kernel that has no rule")
    refuse(not wants_metal(first, second), GRAPH)


def _as_product(target: Tensor | None, *operands: Tensor, summed: bool = False, **_: Any) -> Tensor:
    """A product of two matrices, of two batches, or (`summed`) the sum of such a batch."""
    first, second = operands[-2:]
    fits = first.dim() == second.dim() in (2, 3) and first.dtype == second.dtype
    refuse(not fits or first.shape[-1] != second.shape[-2] or first.shape[:-2] != second.shape[:-2])
    # Before an output is made: nearly all products are MPSGraph's, and pay for this question alone.
    if first.dim() == 2:
        _check_metals(first, second)
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
DIMENSIONS = 16
"""Of the arrays in OrgqrParams."""


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


@rule("linalg_householder_product")
def householder_product(given: Tensor, tau: Tensor) -> Tensor:
    """The first columns of the product of reflections, a threadgroup for each matrix."""
    fits = given.dim() >= 2 and tau.dim() == given.dim() - 1 and tau.dtype == given.dtype
    refuse(not fits or given.shape[-2] < given.shape[-1] or given.shape[-1] < tau.shape[-1])
    if tau.shape[:-1] != given.shape[:-2] or given.numel() == 0 or tau.numel() == 0:
        raise NoRule("no elements, or batches that PyTorch refuses")
    rows, columns = given.shape[-2:]
    kernel = kernels[f"orgqr_{metal(given.dtype)}"]
    # The result has its columns one after another, as LAPACK has them.
    result = torch.empty_like(given.mT, memory_format=torch.contiguous_format).mT.copy_(given)
    square = (*given.shape[:-2], rows, rows)
    work = [given.new_empty(square) for _ in range(3)]
    arrays = (result.stride(), tau.stride(), work[0].stride(), square)
    parameters = i32(given.dim() - 2) + u32(rows, rows * rows, columns, tau.shape[-1])
    parameters += b"".join(padded(u32(numbers), 4 * DIMENSIONS) for numbers in arrays)
    arguments = {"A": result, "tau": tau, "params": parameters}
    arguments |= dict(zip(("H", "H_prod", "H_prod_work"), work, strict=True))
    threads = min(kernel.signature.largest_group, rows * rows)
    kernel.launch(arguments, groups=math.prod(given.shape[:-2]), group=threads)
    return result


@rule("lu_unpack", outputs=by_meta)
def lu_unpack(
    outputs: Sequence[Tensor], factors: Tensor, pivots: Tensor, unpack_data: bool = True, unpack_pivots: bool = True
) -> None:
    """L and U are triangles of the factors; pivots become a permutation by a kernel, then a matrix."""
    permutation, lower, upper = outputs
    rows, columns = factors.shape[-2:]
    least = min(rows, columns)
    if unpack_pivots:
        kernel = kernels[f"unpack_pivots_long_{metal(pivots.dtype)}"]
        if pivots.numel() == 0 or not bool(((pivots >= 1) & (pivots <= rows)).all()):
            raise NoRule("no pivots, or some outside the matrix")
        order = torch.arange(rows, device=factors.device).expand(permutation.shape[:-1]).contiguous()
        pivots = pivots.contiguous()
        strides = [each.stride(-2) if each.dim() > 1 else 0 for each in (order, pivots)]
        kernel.launch({"perm": order, "pivots": pivots, "params": u32(strides, least)}, math.prod(pivots.shape[:-1]))
        permutation.zero_().scatter_(-2, order.unsqueeze(-2), 1.0)
    if unpack_data:
        torch.triu(factors[..., :least, :], out=upper)
        torch.tril(factors[..., :least], -1, out=lower)
        lower.diagonal(0, -2, -1).fill_(1.0)


# Host: operations/Quantized.mm.
FLOATING = (torch.float32, torch.float16, torch.bfloat16)
GROUPS = (32, 64, 128, 256)
"""Inputs that share a scale and a zero point."""
FEW_ROWS = 12
"""Rows of the input from which the host takes the kernel for products of matrices, below it one for vectors."""


@rule("_convert_weight_to_int4pack")
def convert_weight_to_int4pack(weight: Tensor, inner_tiles: int) -> Tensor:
    """Two weights a byte, [outputs, inputs / 2], in the kernels' order; the shape is that of other devices."""
    fits = weight.dim() == 2 and weight.dtype == torch.uint8 and inner_tiles in (2, 4, 8)
    refuse(not fits or weight.shape[0] % 8 or weight.shape[1] * 2 % (16 * inner_tiles))
    weight = weight.contiguous()
    outputs, halves = weight.shape
    shape = (outputs // 8, halves * 2 // (16 * inner_tiles), 32, inner_tiles // 2)
    packed = torch.empty(shape, dtype=torch.int32, device=weight.device)
    bound = {"W": weight, "outputData": packed, "sizes": u32(outputs, halves // 4)}
    kernels["weight_to_int4pack"].launch(bound, (outputs, halves // 4, 1), (64, 1, 1))
    return packed


@rule("_weight_int4pack_mm")
def weight_int4pack_mm(given: Tensor, weight: Tensor, group: int, scales: Tensor) -> Tensor:
    """The product with packed weights; each is (weight - 8) * scale + zero point of its group."""
    _check(given, weight, torch.int32)
    refuse(weight.dim() != 4 or group not in GROUPS or scales.shape[1:] != (weight.shape[0] * 8, 2))
    rows, inputs, outputs = given.shape[0], given.shape[1], weight.shape[0] * 8
    result = given.new_empty((rows, outputs))
    sizes = padded(u32(rows, inputs, outputs), 16)
    arguments = {"A": given, "B": weight, "scales_and_zeros": scales, "output_data": result, "sizes": sizes}
    kernels[f"int4pack_mm_{group}_{metal(given.dtype)}"].launch(arguments, (outputs // 4 * 32, 1, rows), (64, 1, 1))
    return result


@rule("_weight_int8pack_mm")
def weight_int8pack_mm(given: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """The product with weights of eight bits, row by row; of FEW_ROWS rows and more it is left out.

    Those take `large_m_int8pack_mm`, which reads what other simdgroups wrote without two barriers (after the loop over
    the inputs, before the scales overwrite the tile of weights, and before one simdgroup writes all results): what it
    computes depends on their pace. With both put in, it agrees.
    """
    _check(given, weight, torch.int8)
    rows, inputs = given.shape
    outputs = weight.shape[0]
    refuse(weight.shape[1:] != (inputs,) or scales.shape != (outputs,) or outputs % 32 or inputs % 32)
    refuse(rows >= FEW_ROWS, "the kernel's simdgroups race: it lacks two barriers")
    result = given.new_empty((rows, outputs))
    sizes = padded(u32(rows, inputs, outputs), 16)
    arguments = {"A": given, "B": weight, "scalesAndZeros": scales, "outputData": result, "sizes": sizes}
    kernel, groups = kernels[f"int8pack_mv_{metal(given.dtype)}"], (-(-outputs // 8), rows, 1)
    kernel.launch(arguments, groups=groups, group=(64, 1, 1), threadgroup={0: 32})
    return result


def _check(given: Tensor, weight: Tensor, dtype: torch.dtype) -> None:
    fits = given.dim() == 2 and given.dtype in FLOATING and weight.dtype == dtype
    refuse(not fits or not given.is_contiguous() or not weight.is_contiguous())
