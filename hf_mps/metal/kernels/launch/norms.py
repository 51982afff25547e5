"""Layer norm and RMS norm of rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import f32, i32, i64, u32

ROW = 4096
"""Longest row that one threadgroup reads at once: 1,024 threads with four elements each."""


@rule("native_layer_norm", source="operations/Normalization.mm")
def layer_norm(
    release: Release, given: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A threadgroup for each row; rows longer than ROW are walked through in a loop."""
    rows_shape = given.shape[: given.dim() - len(shape)]
    axis, rows = math.prod(shape), math.prod(rows_shape)
    if rows == 0 or axis == 0:
        raise NoRule("nothing to normalise")
    if list(given.shape[given.dim() - len(shape) :]) != list(shape):
        raise NoRule("PyTorch refuses the arguments")
    row = given.contiguous()
    output = torch.empty_like(row)
    statistics = [*rows_shape, *(1 for _ in shape)]
    mean, rstd = (given.new_empty(statistics) for _ in range(2))
    single = axis <= ROW
    name, dtype = f"layer_norm_{'single_row' if single else 'looped'}", metal(given.dtype)
    wide = given.numel() >= 1 << 31
    indexed = f"{name}_i64_{dtype}" if wide else f"{name}_i32_{dtype}"
    newer = indexed in release
    kernel = release.kernel(indexed if newer else f"{name}_{dtype}")
    kernel.launch(
        {
            "input": row,
            "output": output,
            "meanOut": mean,
            "rstdTensor": rstd,
            "axis_size": i64(axis) if wide and newer else u32(axis),
            "epsilon": f32(epsilon),
            "use_weight": i32(weight is not None),
            "use_bias": i32(bias is not None),
            "weight": _as_bound(weight, given, indexed in release),
            "bias": _as_bound(bias, given, indexed in release),
        },
        groups=rows,
        group=32 * math.ceil(axis / 128) if single else 1024,
    )
    return output, mean, rstd


def _as_bound(parameter: Tensor | None, given: Tensor, checked: bool) -> Tensor | None:
    """The weight or bias as the host binds it.

    Before 2.14 this is whatever it is: of a wider dtype than the input's the kernel reads the first bytes as numbers of
    the input's (pytorch issue 190054). Raises NoRule for a narrower one, which it would read beyond, and from 2.14 on.
    """
    if parameter is None:
        return None
    if parameter.dtype != given.dtype and (checked or parameter.dtype.itemsize < given.dtype.itemsize):
        raise NoRule("a weight of another dtype")
    return parameter.contiguous()


@rule("_fused_rms_norm", source="operations/RMSNorm.mm")
def rms_norm(
    release: Release, given: Tensor, shape: list[int], weight: Tensor | None, epsilon: float | None
) -> tuple[Tensor, None]:
    """A threadgroup for each row, as in layer norm. The second result, which gradients use, the host leaves undefined.

    Where a gradient is wanted, or without a weight, rms_norm is composed of other operators on a Mac
    (rms_norm_symint in layer_norm.cpp), and this kernel does not run.
    """
    if torch.is_grad_enabled() and (given.requires_grad or (weight is not None and weight.requires_grad)):
        raise NoRule("composed of other operators where a gradient is wanted")
    if weight is None:
        raise NoRule("composed of other operators without a weight")
    axis = math.prod(shape)
    if given.numel() == 0 or axis == 0:
        raise NoRule("nothing to normalise")
    row = given.contiguous()
    scale = _as_bound(weight, given, checked=True)
    output = torch.empty_like(row)
    single = axis <= ROW
    kernel = release.kernel(f"rms_norm{'' if single else '_looped'}_{metal(given.dtype)}")
    kernel.launch(
        {
            "x": row,
            "w": scale,
            "out": output,
            "eps": f32(2.0**-52 if epsilon is None else epsilon),
            "axis_size": u32(axis),
            "w_stride": u32(1),
        },
        groups=given.numel() // axis,
        group=32 * math.ceil(axis / 128) if single else 1024,
    )
    return output, None
