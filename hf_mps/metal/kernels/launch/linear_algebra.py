"""Factors of matrices by Metal kernels: Cholesky's, QR, the product of Householder reflections, LU unpacked.

All facts are of operations/LinearAlgebra.mm, kernels/LinearAlgebra.h and native/BatchLinearAlgebra.cpp, which calls
the former. LU, solving and inverses are MPSMatrix's up to 2.13, and no Metal kernels of PyTorch's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i32, padded, u32

SOURCE = "operations/LinearAlgebra.mm"
BLOCK = 32
"""Rows and columns of a block of Cholesky's factorisation."""
LARGEST_QR = 512
"""The lesser of rows and columns up to which the host factors on the GPU."""
DIMENSIONS = 16
"""Of the arrays in OrgqrParams."""


@out_rule("linalg_cholesky_ex", source=SOURCE)
def cholesky(
    release: Release,
    outputs: tuple[Tensor, Tensor],
    given: Tensor,
    *,
    upper: bool = False,
    check_errors: bool = False,
) -> None:
    """Block by block: the diagonal block, the blocks below it, then all pairs of those."""
    factor, info = outputs
    if given.dtype != torch.float32:
        raise NoRule("PyTorch refuses the arguments")
    side = "U" if upper else "L"
    kernels = [release.kernel(f"{name}{side}") for name in ("factorDiagonalBlock", "applyTRSM", "applySYRK")]
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
        kernels[0].launch({"A": factor, "info": info, **sizes}, groups=(batches, 1, 1), group=group)
        if left:
            kernels[1].launch({"A": factor, **sizes}, groups=(batches, left, 1), group=group)
            kernels[2].launch({"A": factor, **sizes}, groups=(batches, left * (left + 1) // 2, 1), group=group)
    (factor.triu_ if upper else factor.tril_)()
    if check_errors:
        torch.ops.aten._linalg_check_errors(info, "linalg.cholesky_ex", is_matrix=given.dim() == 2)


@out_rule("linalg_qr", source=SOURCE)
def qr(release: Release, outputs: tuple[Tensor, Tensor], given: Tensor, mode: str = "reduced") -> None:
    """Reflections by one threadgroup a matrix; the whole factors are computed, then cut."""
    orthogonal, upper = outputs
    rows, columns = given.shape[-2:]
    if given.dtype != torch.float32 or mode == "r":
        raise NoRule("PyTorch refuses the arguments")
    if min(rows, columns) > LARGEST_QR or given.numel() == 0:
        raise NoRule("nothing to factor, or a matrix that the host factors on the CPU")
    kernel = release.kernel(f"linalg_qr_householder_{metal(given.dtype)}")
    batches = math.prod(given.shape[:-2])
    info = torch.zeros(1, dtype=torch.int32, device=given.device)
    whole = {"Q": given.new_empty((batches, rows, rows)), "R": given.new_empty((batches, rows, columns))}
    kernel.launch(
        {
            # The kernel works in the copy's memory.
            "A": given.reshape(batches, rows, columns).clone(memory_format=torch.contiguous_format),
            **whole,
            "info": info,
            "params": u32(rows, columns),
            "v_work": given.new_empty((batches, rows)),
        },
        groups=batches,
        group=1024,
    )
    if info.item():
        raise NoRule("the kernel reports a failure")
    orthogonal.copy_(whole["Q"][..., : orthogonal.shape[-1]].reshape(orthogonal.shape))
    upper.copy_(whole["R"][:, : upper.shape[-2]].reshape(upper.shape))


@rule("linalg_householder_product", source=SOURCE)
def householder_product(release: Release, given: Tensor, tau: Tensor) -> Tensor:
    """The first columns of the product of reflections, a threadgroup for each matrix."""
    fits = given.dim() >= 2 and tau.dim() == given.dim() - 1 and tau.dtype == given.dtype
    if not fits or given.shape[-2] < given.shape[-1] or given.shape[-1] < tau.shape[-1]:
        raise NoRule("PyTorch refuses the arguments")
    if tau.shape[:-1] != given.shape[:-2] or given.numel() == 0 or tau.numel() == 0:
        raise NoRule("no elements, or batches that PyTorch refuses")
    rows, columns = given.shape[-2:]
    kernel = release.kernel(f"orgqr_{metal(given.dtype)}")
    # The result has its columns one after another, as LAPACK has them.
    result = torch.empty_like(given.mT, memory_format=torch.contiguous_format).mT.copy_(given)
    square = (*given.shape[:-2], rows, rows)
    work = [given.new_empty(square) for _ in range(3)]
    arrays = (result.stride(), tau.stride(), work[0].stride(), square)
    parameters = i32(given.dim() - 2) + u32(rows, rows * rows, columns, tau.shape[-1])
    parameters += b"".join(padded(u32(numbers), 4 * DIMENSIONS) for numbers in arrays)
    threads = min(kernel.signature.largest_group, rows * rows)
    kernel.launch(
        {"A": result, "tau": tau, "H": work[0], "H_prod": work[1], "H_prod_work": work[2], "params": parameters},
        groups=math.prod(given.shape[:-2]),
        group=threads,
    )
    return result


@out_rule("lu_unpack", source=SOURCE)
def lu_unpack(
    release: Release,
    outputs: tuple[Tensor, Tensor, Tensor],
    factors: Tensor,
    pivots: Tensor,
    unpack_data: bool = True,
    unpack_pivots: bool = True,
) -> None:
    """L and U are triangles of the factors; pivots become a permutation by a kernel, then a matrix."""
    permutation, lower, upper = outputs
    rows, columns = factors.shape[-2:]
    least = min(rows, columns)
    if unpack_pivots:
        kernel = release.kernel(f"unpack_pivots_long_{metal(pivots.dtype)}")
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
