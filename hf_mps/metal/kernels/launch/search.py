"""Where values belong in sorted boundaries: searchsorted and bucketize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import refuse_misfit, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i64

SOURCE = "operations/Bucketization.mm"
GROUP = 1024


@rule("searchsorted.Tensor", "searchsorted.Tensor_out", "searchsorted.Scalar", source=SOURCE)
def searchsorted(
    release: Release,
    boundaries: Tensor,
    given: Tensor | float,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """A thread for each value; inputs of two dtypes are promoted to one. What PyTorch refuses has no rule.

    A number becomes a tensor of no dimension on the device, which counts less than one in promotion.
    """
    if not isinstance(given, Tensor):
        given = torch.tensor(given, dtype=torch.result_type(boundaries, given), device=boundaries.device)
    batch = boundaries.dim() != 1
    if (
        not boundaries.dim()
        or (batch and boundaries.shape[:-1] != given.shape[:-1])
        or side not in {None, "left", "right"}
        or (side == "left" and right)
        or (sorter is not None and (sorter.shape != boundaries.shape or sorter.dtype != torch.int64))
    ):
        raise NoRule("PyTorch refuses the arguments")
    dtype = torch.int32 if out_int32 else torch.int64
    if out is not None:
        refuse_misfit(out, given.shape, dtype)
    if boundaries.dtype != given.dtype or not (boundaries.is_mps and given.is_mps):
        common = torch.result_type(boundaries, given)
        boundaries, given = boundaries.to(common), given.to(boundaries.device, common)
    result = out if out is not None else given.new_empty(given.shape, dtype=dtype)
    if not given.numel():
        return result
    found = result if result.is_contiguous() else result.contiguous()
    kernel = f"searchsorted_{metal(given.dtype)}_{metal(dtype)}"
    bound = {
        "data_in": given.contiguous(),
        "data_bd": boundaries.contiguous(),
        "data_out": found,
        "idim_in": i64(given.shape[-1] if given.dim() else 1),
        "idim_bd": i64(boundaries.shape[-1]),
        "numel_in": i64(given.numel()),
        "right": i64(right or side == "right"),
        "is_1d_boundaries": i64(not batch),
    }
    if sorter is not None:
        kernel, bound["data_sort"] = f"{kernel}_sorter", sorter.contiguous()
    threads = min(GROUP, given.numel())
    release.kernel(kernel).launch(bound, groups=min(1024, -(-given.numel() // threads)), group=threads)
    return result if found is result else result.copy_(found)


@rule("bucketize.Tensor", "bucketize.Tensor_out", "bucketize.Scalar", source=SOURCE)
def bucketize(release: Release, given: Tensor | float, boundaries: Tensor, **options: Any) -> Tensor:
    """searchsorted in boundaries of one dimension."""
    if boundaries.dim() != 1:
        raise NoRule("PyTorch refuses the arguments")
    result: Tensor = searchsorted(release, boundaries, given, **options)
    return result
