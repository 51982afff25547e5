"""Gated linear units and the logarithm of the sigmoid, kernels from 2.14 on."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.kernels.dtypes import metal
from hf_mps.kernels.launch.iterator import plane
from hf_mps.kernels.launch.pointwise import exec_binary, exec_unary
from hf_mps.kernels.launch.results import as_common
from hf_mps.kernels.release import Release
from hf_mps.kernels.rules import out_rule, rule
from hf_mps.kernels.runtime import NoRule
from hf_mps.kernels.values import i64

SOURCE = "operations/Activation.mm"


@rule("log_sigmoid_forward", source=SOURCE)
def log_sigmoid(release: Release, self: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and an empty buffer: only the CPU's gradient reads one."""
    output = torch.empty_like(self)
    exec_unary(release, output, self, "log_sigmoid_forward")
    return output, torch.empty(0, dtype=self.dtype, device=self.device)


def _as_log_sigmoid_backward(target: Tensor | None, grad_output: Tensor, self: Tensor, buffer: Tensor) -> Tensor:
    return as_common(target, self, grad_output)


@out_rule("log_sigmoid_backward", source=SOURCE, outputs=_as_log_sigmoid_backward)
def log_sigmoid_backward(
    release: Release, grad_input: Tensor, grad_output: Tensor, self: Tensor, buffer: Tensor
) -> None:
    """Its gradient, of the input alone."""
    exec_binary(release, grad_input, self, grad_output, "log_sigmoid_backward")


@out_rule("glu", source=SOURCE)
def glu(release: Release, output: Tensor, self: Tensor, dim: int = -1) -> None:
    """The first half along a dimension times the second's sigmoid: in one grid where nothing is strided."""
    kernel = f"glu_dense_{metal(self.dtype)}"
    if kernel not in release:
        raise NoRule("MPSGraph on this release")
    if output.numel() == 0:
        return
    half = self.shape[dim] // 2
    if self.is_contiguous() and output.is_contiguous():
        _launch_halves(release, kernel, [output, self], self, dim)
    else:
        exec_binary(release, output, self.narrow(dim, 0, half), self.narrow(dim, half, half), "glu")


@out_rule("glu_backward", source=SOURCE)
def glu_backward(release: Release, grad_input: Tensor, grad_output: Tensor, self: Tensor, dim: int) -> None:
    """Its gradient."""
    kernel = f"glu_backward_dense_{metal(self.dtype)}"
    if kernel not in release:
        raise NoRule("MPSGraph on this release")
    if not all(each.is_contiguous() for each in (grad_input, grad_output, self)):
        raise NoRule("a gradient of a strided glu")
    if grad_input.numel():
        _launch_halves(release, kernel, [grad_input, self, grad_output], self, dim)


def _launch_halves(release: Release, kernel: str, operands: list[Tensor], self: Tensor, dim: int) -> None:
    """A line of threads for the elements of a half, one line for each place before the dimension."""
    inner = math.prod(self.shape[dim % self.dim() :]) // 2
    outer = self.numel() // (2 * inner)
    release.kernel(kernel).launch([*operands, i64(inner)], *plane(inner, outer))
