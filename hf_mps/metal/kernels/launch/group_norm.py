"""Group norm: a threadgroup for each group of a sample, and for each channel of the weight's gradient."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule

SOURCE = "operations/GroupNorm.mm"
BLOCK = 4
"""Elements that a thread reads at a time (BLOCK_SIZE of kernels/GroupNorm.h)."""


@rule("native_group_norm", source=SOURCE)
def forward(
    release: Release,
    given: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: int,
    channels: int,
    pixels: int,
    groups: int,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Where a weight has another dtype than the input (float32 beside bfloat16), the statistics have the weight's."""
    _check(given, channels, groups)
    parameters = [each for each in (weight, bias) if each is not None]
    if any(each.numel() != channels or each.dtype != parameters[0].dtype for each in parameters):
        raise NoRule("PyTorch refuses the arguments")
    image = given.contiguous()
    # The dtype of the statistics (param_scalar_type of cpu/mixed_data_type.h).
    of = parameters[0].dtype if parameters and parameters[0].dtype != given.dtype else given.dtype
    output = torch.empty_like(image)
    mean, rstd = (torch.empty((samples, groups), dtype=of, device=given.device) for _ in range(2))
    elements = channels // groups * pixels
    names = [metal(given.dtype), metal(of), *("void" if each is None else metal(each.dtype) for each in (weight, bias))]
    release.kernel(f"group_norm_{'_'.join(names)}_uint32_t").launch(
        {
            "Y": output,
            "mean": mean,
            "rstd": rstd,
            "X": image,
            "gamma": None if weight is None else weight.contiguous(),
            "beta": None if bias is None else bias.contiguous(),
            "params": _params(pixels, groups, channels, samples, epsilon),
        },
        groups=samples * groups,
        group=_threads(elements),
    )
    return output, mean, rstd


@rule("native_group_norm_backward", source=SOURCE)
def backward(
    release: Release,
    gradient: Tensor,
    given: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    samples: int,
    channels: int,
    pixels: int,
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """One kernel for the input's gradient, one for both parameters'."""
    _check(given, channels, groups)
    image, upstream = given.contiguous(), gradient.contiguous()
    if upstream.dtype != image.dtype or mean.dtype != rstd.dtype:
        raise NoRule("PyTorch refuses the arguments")
    mean, rstd = mean.contiguous(), rstd.contiguous()
    gamma = None if weight is None else weight.contiguous()
    params = _params(pixels, groups, channels, samples, 0.0)
    types = f"{metal(image.dtype)}_{metal(mean.dtype)}"
    common = {"dY": upstream, "X": image, "mean": mean, "rstd": rstd, "params": params}
    of = given.dtype if weight is None else weight.dtype
    by_input = torch.empty_like(image) if wanted[0] else None
    by_weight, by_bias = (
        torch.empty(channels, dtype=of, device=given.device) if any(wanted[1:]) else None for _ in range(2)
    )
    if by_input is not None:
        name = f"group_norm_backward_x_{types}_{'void' if weight is None else metal(of)}_uint32_t"
        release.kernel(name).launch(
            {**common, "dX": by_input, "gamma": gamma},
            groups=samples * groups,
            group=_threads(channels // groups * pixels),
        )
    if by_weight is not None:
        release.kernel(f"group_norm_backward_affine_{types}_{metal(of)}_uint32_t").launch(
            {**common, "dgamma": by_weight, "dbeta": by_bias}, groups=channels, group=_threads(samples * pixels)
        )
    return by_input, by_weight if wanted[1] else None, by_bias if wanted[2] else None


def _check(given: Tensor, channels: int, groups: int) -> None:
    if given.numel() == 0:
        raise NoRule("nothing to normalise")
    if given.numel() >= 1 << 32 or channels % groups:
        raise NoRule("PyTorch refuses the arguments")


def _params(pixels: int, groups: int, channels: int, samples: int, epsilon: float) -> bytes:
    """The bytes of GroupNormParams<uint32_t>."""
    each = channels // groups
    return struct.pack("<6If", pixels, groups, each, each * pixels, channels, samples * pixels, epsilon)


def _threads(elements: int) -> int:
    """A thread for each block of elements, whole simdgroups, 1,024 at most."""
    return min(1024, 32 * -(-elements // (BLOCK * 32)))
