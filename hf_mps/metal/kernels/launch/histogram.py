"""histc: a histogram for each element by one thread, then their sum."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import refuse_misfit, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i64, u8, u32, u64

LINEAR = 0
"""Bins of one width: the bin is computed, not searched for (BIN_SELECTION_ALGORITHM)."""
NO_WEIGHT = -1


@rule("histc", "histc.out", source="operations/HistogramKernel.mm")
def histc(
    release: Release, given: Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: Tensor | None = None
) -> Tensor:
    """Elements outside the edges, and NaN, count nowhere. Equal edges are the least and the greatest element."""
    if not given.is_floating_point():
        raise NoRule("no rule yet for whole numbers")
    if bins <= 0 or not given.numel():
        raise NoRule("no element, or what PyTorch refuses")
    if out is not None:
        refuse_misfit(out, [bins], given.dtype)
    kernel = release.kernel(f"histogramdd_{metal(given.dtype)}")
    first, last = _edges(given, float(min), float(max))
    edges = torch.linspace(first, last, bins + 1, dtype=given.dtype, device=given.device).cpu()
    source = given.reshape(given.numel(), 1)
    count = source.shape[0]
    places = torch.empty(count, dtype=torch.int32, device=given.device)
    shape, strides = u32(*source.shape), u32(*source.stride())
    group = 1024 if count > 1024 else count
    release.kernel("kernel_index_offset").launch(
        {"strides": strides, "data_offsets": places, "iter_shape": shape, "num_dimensions": u32(2)},
        threads=count,
        group=group,
    )
    of_each = torch.zeros((count, bins), dtype=given.dtype, device=given.device)
    kernel.launch(
        {
            "input_": source,
            "weight": None,
            "local_out": of_each,
            "offsets": places,
            "num_dims": u64(1),
            "bin_seq": _bytes(edges),
            "num_bin_edges": i64(bins + 1),
            "leftmost_edge": _bytes(edges[:1]),
            "rightmost_edge": _bytes(edges[-1:]),
            "local_out_strides": i64(bins, 1),
            "algorithm": u8(LINEAR),
            "weight_stride": i64(NO_WEIGHT),
        },
        threads=count,
        group=group,
    )
    if out is None:
        return of_each.sum(0)
    return torch.sum(of_each, 0, out=out)


def _edges(given: Tensor, first: float, last: float) -> tuple[float, float]:
    """The outer edges (histc_select_outer_bin_edges of Histogram.cpp). Raises NoRule where PyTorch refuses them."""
    if first == last:
        least, greatest = torch.aminmax(given)
        first, last = least.item(), greatest.item()
    if first == last:
        first, last = first - 1, last + 1
    if not (math.isfinite(first) and math.isfinite(last) and first < last):
        raise NoRule("PyTorch refuses the arguments")
    return first, last


def _bytes(edges: Tensor) -> bytes:
    return edges.contiguous().view(torch.uint8).numpy().tobytes()
