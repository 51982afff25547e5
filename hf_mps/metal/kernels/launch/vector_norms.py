"""Norms of vectors: along dimensions or of all elements, and renorm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.reduce import DIMENSIONS, GROUP, INNER, is_dense, parameters
from hf_mps.metal.kernels.launch.reductions import REFUSED, kept, result, wrapped
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule, refuse_misfit, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, u32

SOURCE = "operations/ReduceOps.mm"
REAL = {torch.complex64: torch.float32, torch.complex32: torch.float16}


@rule("linalg_vector_norm", "linalg_vector_norm.out", source=SOURCE)
@rule("norm.ScalarOpt_dim", "norm.out", source="../ReduceOps.cpp")
@rule("norm.ScalarOpt_dim_dtype", "norm.dtype_out", source="../ReduceOps.cpp")
def norms(
    release: Release,
    given: Tensor,
    order: float | None = 2,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """linalg_vector_norm_out of LinearAlgebra.cpp, then norm_kernel_mps: one value is its absolute value.

    `norm` without an order has order 2.
    """
    dims = wrapped(dim, given.dim())
    cast = dtype or given.dtype
    if not (given.is_floating_point() or given.is_complex()):
        raise NoRule(REFUSED)
    output = result(given, dims, keepdim, REAL.get(cast, cast), out)
    source = given if given.dtype == cast else given.to(cast)
    order = 2.0 if order is None else float(order)
    if not source.numel():
        if order < 0 or math.isinf(order):
            raise NoRule(REFUSED)
        return output.zero_() if output.numel() else output
    if all(given.shape[at] == 1 for at in dims):
        rest = source if keepdim or not dims else source.squeeze(tuple(dims))
        torch.abs(rest, out=output) if order else torch.ne(rest, 0, out=output)
        return output
    _reduced(release, source, output, order, dims)
    return output


def _renormed(target: Tensor | None, given: Tensor, order: float, dim: int, most: float) -> Tensor:
    rank = given.dim()
    if rank < 2 or not -rank <= dim < rank or float(order) <= 0 or float(most) < 0 or not given.is_floating_point():
        raise NoRule(REFUSED)
    if target is None:
        return torch.empty(given.shape, dtype=given.dtype, device=given.device)
    refuse_misfit(target, given.shape, given.dtype)
    return target


def _reduced(release: Release, source: Tensor, output: Tensor, order: float, dims: set[int]) -> None:
    """Rows of order 1 and 2 by a simdgroup each; all else by a threadgroup for each result, whatever the strides."""
    rank = source.dim()
    if rank > DIMENSIONS:
        raise NoRule(f"more than {DIMENSIONS} dimensions")
    sizes, strides = kept(output, dims, rank)
    types = f"{metal(source.dtype)}_{metal(output.dtype)}"
    inner = f"norm_l{int(order) if order in {1.0, 2.0} else 0}_reduction_inner_{types}"
    reduced = [at for at in range(rank) if source.shape[at] != sizes[at]]
    dense = output.numel() > 1 and source.is_contiguous() and is_dense(sizes, strides)
    if dense and reduced == [rank - 1] and inner in release:
        columns = source.shape[-1]
        rows = source.numel() // columns
        release.kernel(inner).launch(
            {"input": source, "output": output, "sizes": u32(rows, columns), "divisor": f32(0.0)},
            groups=-(-rows // (INNER // 32)),
            group=INNER,
        )
        return
    length = source.numel() // output.numel()
    params = parameters(order, length, source.shape, source.stride(), sizes, strides)
    release.kernel(f"norm_{types}").launch(
        {"input": source, "output": output, "params": params}, groups=output.numel(), group=min(GROUP, length)
    )


@out_rule("renorm", source="operations/RenormKernel.mm", outputs=_renormed)
def renorm(release: Release, output: Tensor, given: Tensor, order: float, dim: int, most: float) -> None:
    """The norm of each slice, the factor that shortens it, and their product."""
    dim %= given.dim()
    rest = [at for at in range(given.dim()) if at != dim]
    lengths = torch.linalg.vector_norm(given, float(order), rest, keepdim=True)
    factor = torch.empty(lengths.shape, dtype=given.dtype, device=given.device)
    kernel = release.kernel(f"renorm_{metal(given.dtype)}")
    count = lengths.numel()
    if count:
        kernel.launch({"norm": lengths, "factor": factor, "maxnorm": f32(most)}, threads=count, group=min(GROUP, count))
    torch.mul(given, factor, out=output)
