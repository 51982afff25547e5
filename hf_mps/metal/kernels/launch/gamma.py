"""Gamma, Dirichlet, Poisson and binomial numbers, and the gradients of the first two.

An element may take up to 32 numbers of Philox's stream; the generator moves by so many for each.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.random import drawn
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import u32

SOURCE = "operations/Distributions.mm"
STRIDE = 32


def _sampled(release: Release, family: str, given: list[Tensor], generator: Generator | None) -> Tensor:
    """A thread for each element of parameters of one shape."""
    output = _contiguous_like(given[0])
    kernel = release.kernel(f"{family}_{metal(output.dtype)}")
    if output.numel() >= 1 << 31:
        raise NoRule("more than 2**31 elements")
    dense = [each.contiguous() for each in given]
    if output.numel():
        kernel.launch([output, *dense, drawn(generator, STRIDE * output.numel())], output.numel())
    return output


def _contiguous_like(given: Tensor) -> Tensor:
    return torch.empty_like(given, memory_format=torch.contiguous_format)


@rule("_standard_gamma", source=SOURCE, family="standard_gamma")
@rule("poisson", source=SOURCE, family="poisson")
def sampled(release: Release, given: Tensor, generator: Generator | None = None, *, family: str) -> Tensor:
    """Gamma numbers of shape `given` and scale one, or Poisson's of that rate: missing on mps before 2.14."""
    return _sampled(release, family, [given], generator)


@rule("binomial", source=SOURCE)
def binomial(release: Release, count: Tensor, p: Tensor, generator: Generator | None = None) -> Tensor:
    """Missing on mps before 2.14."""
    if not (count.is_floating_point() and p.is_floating_point()):
        raise NoRule("a dtype that PyTorch refuses")
    return _sampled(release, "standard_binomial", [count, p.expand(count.shape).to(count.dtype)], generator)


@rule("_sample_dirichlet", source=SOURCE)
def dirichlet(release: Release, alpha: Tensor, generator: Generator | None = None) -> Tensor:
    """A threadgroup for each row of the last dimension, which sums to one."""
    output, dense = _contiguous_like(alpha), alpha.contiguous()
    kernel = release.kernel(f"standard_dirichlet_{metal(output.dtype)}")
    count = output.numel()
    if count:
        row = alpha.shape[-1] if alpha.dim() else 1
        arguments = [output, dense, drawn(generator, STRIDE * count), u32(row)]
        kernel.launch(arguments, groups=count // row, group=min(row, 1024))
    return output


@rule("_standard_gamma_grad", source=SOURCE, family="standard_gamma_grad")
@rule("_dirichlet_grad", source=SOURCE, family="dirichlet_grad")
def gradient(release: Release, *given: Tensor, family: str) -> Tensor:
    """How a gamma number, or a row's number, moves with its shape."""
    output = _contiguous_like(given[0])
    kernel = release.kernel(f"{family}_{metal(output.dtype)}")
    if any(each.shape != output.shape or each.dtype != output.dtype for each in given):
        raise NoRule("operands of several shapes or dtypes")
    dense = [each.contiguous() for each in given]
    if output.numel():
        kernel.launch([output, *dense], output.numel())
    return output
