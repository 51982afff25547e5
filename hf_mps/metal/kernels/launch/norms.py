"""Layer norm, RMS norm and group norm, and norms of vectors."""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.kernels.launch.pointwise import is_dense
from hf_mps.metal.kernels.launch.reduce import GROUP, INNER, parameters
from hf_mps.metal.kernels.launch.reductions import Dims, kept, wrapped
from hf_mps.metal.kernels.rules import by_meta, kernels, refuse, rule
from hf_mps.metal.kernels.values import DIMENSIONS, NoRule, f32, i32, i64, metal, u32

ROW = 4096
"""Longest row that one threadgroup reads at once: 1,024 threads with four elements each."""


# Host: operations/Normalization.mm.
@rule("native_layer_norm")
def layer_norm(
    given: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A threadgroup for each row; rows longer than ROW are walked through in a loop."""
    rows_shape = given.shape[: given.dim() - len(shape)]
    axis, rows = math.prod(shape), math.prod(rows_shape)
    refuse(rows == 0 or axis == 0, "nothing to normalise")
    refuse(list(given.shape[given.dim() - len(shape) :]) != list(shape))
    row = given.contiguous()
    output = torch.empty_like(row)
    mean, rstd = (given.new_empty([*rows_shape, *(1 for _ in shape)]) for _ in range(2))
    single = axis <= ROW
    name, dtype = f"layer_norm_{'single_row' if single else 'looped'}", metal(given.dtype)
    wide = given.numel() >= 1 << 31
    indexed = f"{name}_{'i64' if wide else 'i32'}_{dtype}"
    newer = indexed in kernels
    kernel = kernels[indexed if newer else f"{name}_{dtype}"]
    arguments: dict[str, Tensor | bytes | None] = {"input": row, "output": output, "meanOut": mean, "rstdTensor": rstd}
    arguments |= {"axis_size": i64(axis) if wide and newer else u32(axis), "epsilon": f32(epsilon)}
    arguments |= {"use_weight": i32(weight is not None), "weight": _as_bound(weight, given, newer)}
    arguments |= {"use_bias": i32(bias is not None), "bias": _as_bound(bias, given, newer)}
    kernel.launch(arguments, groups=rows, group=32 * math.ceil(axis / 128) if single else 1024)
    return output, mean, rstd


def _as_bound(parameter: Tensor | None, given: Tensor, checked: bool) -> Tensor | None:
    """Return the weight or bias as the host binds it.

    Before 2.14 this is whatever it is: of a wider dtype than the input's the kernel reads the first bytes as numbers of
    the input's (pytorch issue 190054). Raises NoRule for a narrower one, which it would read beyond, and from 2.14 on.
    """
    if parameter is None:
        return None
    if parameter.dtype != given.dtype and (checked or parameter.dtype.itemsize < given.dtype.itemsize):
        raise NoRule("a weight of another dtype")
    return parameter.contiguous()


# Host: operations/RMSNorm.mm.
@rule("_fused_rms_norm")
def rms_norm(given: Tensor, shape: list[int], weight: Tensor | None, epsilon: float | None) -> tuple[Tensor, None]:
    """A threadgroup for each row, as in layer norm. The second result, which gradients use, the host leaves undefined.

    Where a gradient is wanted, or without a weight, rms_norm is composed of other operators on a Mac
    (rms_norm_symint in layer_norm.cpp), and this kernel does not run.
    """
    if torch.is_grad_enabled() and (given.requires_grad or (weight is not None and weight.requires_grad)):
        raise NoRule("composed of other operators where a gradient is wanted")
    refuse(weight is None, "composed of other operators without a weight")
    axis = math.prod(shape)
    refuse(given.numel() == 0 or axis == 0, "nothing to normalise")
    row = given.contiguous()
    scale = _as_bound(weight, given, checked=True)
    output = torch.empty_like(row)
    single = axis <= ROW
    kernel = kernels[f"rms_norm{'' if single else '_looped'}_{metal(given.dtype)}"]
    # Without an epsilon the host takes a double's (numeric_limits<double>), although the kernel computes in float32.
    numbers = {"eps": f32(2.0**-52 if epsilon is None else epsilon), "axis_size": u32(axis), "w_stride": u32(1)}
    group = 32 * math.ceil(axis / 128) if single else 1024
    kernel.launch({"x": row, "w": scale, "out": output, **numbers}, groups=given.numel() // axis, group=group)
    return output, None


# Host: operations/GroupNorm.mm.
BLOCK = 4
"""Elements that a thread reads at a time (BLOCK_SIZE of kernels/GroupNorm.h)."""


@rule("native_group_norm")
def group_norm(given: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Where a weight has another dtype than the input (float32 beside bfloat16), the statistics have the weight's."""
    samples, channels, pixels, groups, epsilon = sizes
    _check_groups(given, channels, groups)
    learned = [each for each in (weight, bias) if each is not None]
    # The dtype of the statistics (param_scalar_type of cpu/mixed_data_type.h).
    of = learned[0].dtype if learned else given.dtype
    refuse(any(each.numel() != channels or each.dtype != of for each in learned))
    image = given.contiguous()
    output = torch.empty_like(image)
    mean, rstd = (given.new_empty((samples, groups), dtype=of) for _ in range(2))
    names = [metal(given.dtype), metal(of), *("void" if each is None else metal(each.dtype) for each in (weight, bias))]
    gamma, beta = (None if each is None else each.contiguous() for each in (weight, bias))
    arguments = {"Y": output, "mean": mean, "rstd": rstd, "X": image, "gamma": gamma, "beta": beta}
    bound = {**arguments, "params": _group_params(pixels, groups, channels, samples, epsilon)}
    kernel = kernels[f"group_norm_{'_'.join(names)}_uint32_t"]
    kernel.launch(bound, groups=samples * groups, group=_threads(channels // groups * pixels))
    return output, mean, rstd


@rule("native_group_norm_backward")
def group_norm_backward(
    gradient: Tensor, given: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None, *sizes: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """One kernel for the input's gradient, one for both parameters'."""
    samples, channels, pixels, groups, wanted = sizes
    _check_groups(given, channels, groups)
    image, upstream = given.contiguous(), gradient.contiguous()
    refuse(upstream.dtype != image.dtype or mean.dtype != rstd.dtype)
    mean, rstd = mean.contiguous(), rstd.contiguous()
    gamma = None if weight is None else weight.contiguous()
    params = _group_params(pixels, groups, channels, samples, 0.0)
    types = f"{metal(image.dtype)}_{metal(mean.dtype)}"
    common = {"dY": upstream, "X": image, "mean": mean, "rstd": rstd, "params": params}
    of = given.dtype if weight is None else weight.dtype
    by_input = torch.empty_like(image) if wanted[0] else None
    by_weight, by_bias = (given.new_empty(channels, dtype=of) if any(wanted[1:]) else None for _ in range(2))
    if by_input is not None:
        name = f"group_norm_backward_x_{types}_{'void' if weight is None else metal(of)}_uint32_t"
        bound = {**common, "dX": by_input, "gamma": gamma}
        kernels[name].launch(bound, groups=samples * groups, group=_threads(channels // groups * pixels))
    if by_weight is not None:
        bound = {**common, "dgamma": by_weight, "dbeta": by_bias}
        kernel = kernels[f"group_norm_backward_affine_{types}_{metal(of)}_uint32_t"]
        kernel.launch(bound, groups=channels, group=_threads(samples * pixels))
    return by_input, by_weight if wanted[1] else None, by_bias if wanted[2] else None


def _check_groups(given: Tensor, channels: int, groups: int) -> None:
    refuse(given.numel() == 0, "nothing to normalise")
    refuse(given.numel() >= 1 << 32 or channels % groups)


def _group_params(pixels: int, groups: int, channels: int, samples: int, epsilon: float) -> bytes:
    """Return the bytes of GroupNormParams<uint32_t>."""
    each = channels // groups
    return struct.pack("<6If", pixels, groups, each, each * pixels, channels, samples * pixels, epsilon)


def _threads(elements: int) -> int:
    """A thread for each block of elements, whole simdgroups, 1,024 at most."""
    return min(1024, 32 * -(-elements // (BLOCK * 32)))


# Host: operations/ReduceOps.mm.
# Host: ../ReduceOps.cpp.
@rule("linalg_vector_norm", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype", outputs=by_meta)
def norms(
    output: Tensor, given: Tensor, order: float | None = 2, dim: Dims = None, *_: bool, dtype: torch.dtype | None = None
) -> None:
    """linalg_vector_norm_out of LinearAlgebra.cpp, then norm_kernel_mps: one value is its absolute value.

    `norm` without an order has order 2.
    """
    dims = wrapped(dim, given.dim())
    source = given if dtype is None else given.to(dtype)
    order = 2.0 if order is None else float(order)
    sizes, strides = kept(output, dims, rank := source.dim())
    if not source.numel():
        refuse(order < 0 or math.isinf(order))
        output.zero_()
        return
    if all(given.shape[at] == 1 for at in dims):
        rest = source.view_as(output)
        torch.abs(rest, out=output) if order else torch.ne(rest, 0, out=output)
        return
    # Rows of order 1 and 2 by a simdgroup each; all else by a threadgroup for each result, whatever the strides.
    refuse(rank > DIMENSIONS, f"more than {DIMENSIONS} dimensions")
    types = f"{metal(source.dtype)}_{metal(output.dtype)}"
    inner = f"norm_l{int(order) if order in {1.0, 2.0} else 0}_reduction_inner_{types}"
    reduced = [at for at in range(rank) if source.shape[at] != sizes[at]]
    dense = output.numel() > 1 and source.is_contiguous() and is_dense(sizes, strides)
    bound: dict[str, Tensor | bytes] = {"input": source, "output": output}
    if dense and reduced == [rank - 1] and inner in kernels:
        rows = source.numel() // source.shape[-1]
        # Sums and norms share these kernels, which divide by what a mean binds; 0 divides by nothing.
        bound |= {"sizes": u32(rows, source.shape[-1]), "divisor": f32(0.0)}
        kernels[inner].launch(bound, groups=-(-rows // (INNER // 32)), group=INNER)
    else:
        length = source.numel() // output.numel()
        bound["params"] = parameters(order, length, source.shape, source.stride(), sizes, strides)
        kernels[f"norm_{types}"].launch(bound, groups=output.numel(), group=min(GROUP, length))
