"""Gamma, Dirichlet, Poisson and binomial numbers, and the gradients of the first two.

An element may take up to 32 numbers of Philox's stream; the generator moves by so many for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Generator, Tensor

from hf_mps.kernels.dtypes import metal
from hf_mps.kernels.launch.random import drawn
from hf_mps.kernels.rules import rule
from hf_mps.kernels.runtime import NoRule
from hf_mps.kernels.values import u32

if TYPE_CHECKING:
    from hf_mps.kernels.release import Release

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


@rule("_standard_gamma", source=SOURCE)
def gamma(release: Release, alpha: Tensor, generator: Generator | None = None) -> Tensor:
    """Shape `alpha`, scale one."""
    return _sampled(release, "standard_gamma", [alpha], generator)


@rule("poisson", source=SOURCE)
def poisson(release: Release, rate: Tensor, generator: Generator | None = None) -> Tensor:
    """Missing on mps before 2.14."""
    return _sampled(release, "poisson", [rate], generator)


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


def _gradient(release: Release, family: str, given: list[Tensor]) -> Tensor:
    output = _contiguous_like(given[0])
    kernel = release.kernel(f"{family}_{metal(output.dtype)}")
    if any(each.shape != output.shape or each.dtype != output.dtype for each in given):
        raise NoRule("operands of several shapes or dtypes")
    dense = [each.contiguous() for each in given]
    if output.numel():
        kernel.launch([output, *dense], output.numel())
    return output


@rule("_standard_gamma_grad", source=SOURCE)
def gamma_gradient(release: Release, alpha: Tensor, output: Tensor) -> Tensor:
    """How a gamma number moves with its shape."""
    return _gradient(release, "standard_gamma_grad", [alpha, output])


@rule("_dirichlet_grad", source=SOURCE)
def dirichlet_gradient(release: Release, x: Tensor, alpha: Tensor, total: Tensor) -> Tensor:
    """How a row's number moves with its shape."""
    return _gradient(release, "dirichlet_grad", [x, alpha, total])
