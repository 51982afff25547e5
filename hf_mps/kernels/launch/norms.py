"""Layer norm and RMS norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_mps.kernels.dtypes import metal
from hf_mps.kernels.rules import rule
from hf_mps.kernels.runtime import NoRule
from hf_mps.kernels.values import f32, i32, u32

if TYPE_CHECKING:
    from hf_mps.kernels.release import Release

ROW = 4096
"""Longest row that one threadgroup reads at once: 1,024 threads with four elements each."""


@rule("native_layer_norm", source="operations/Normalization.mm")
def layer_norm(
    release: Release, given: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A threadgroup for each row; rows longer than ROW are walked through in a loop."""
    rows_shape = given.shape[: given.dim() - len(shape)]
    axis, rows = math.prod(shape), math.prod(rows_shape)
    row = given.contiguous()
    output = torch.empty_like(row)
    statistics = [*rows_shape, *(1 for _ in shape)]
    mean, rstd = (torch.empty(statistics, dtype=given.dtype, device=given.device) for _ in range(2))
    if rows == 0 or axis == 0:
        raise NoRule("nothing to normalise")
    single = axis <= ROW
    kernel = release.kernel(f"layer_norm_{'single_row' if single else 'looped'}_{metal(given.dtype)}")
    threads = 32 * math.ceil(axis / 128) if single else 1024
    kernel.launch(
        {
            "input": row,
            "output": output,
            "meanOut": mean,
            "rstdTensor": rstd,
            "axis_size": u32(axis),
            "epsilon": f32(epsilon),
            "use_weight": i32(weight is not None),
            "use_bias": i32(bias is not None),
            "weight": None if weight is None else weight.contiguous(),
            "bias": None if bias is None else bias.contiguous(),
        },
        groups=rows,
        group=threads,
    )
    return output, mean, rstd
