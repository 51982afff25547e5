"""Activations of networks, forward and backward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_mps.metal.kernels.dtypes import metal
from hf_mps.metal.kernels.launch.iterator import plane
from hf_mps.metal.kernels.launch.numbers import alpha, params
from hf_mps.metal.kernels.launch.pointwise import exec_binary, exec_unary
from hf_mps.metal.kernels.launch.results import as_common, as_input
from hf_mps.metal.kernels.release import Release
from hf_mps.metal.kernels.rules import out_rule, rule
from hf_mps.metal.kernels.runtime import NoRule
from hf_mps.metal.kernels.values import i64

SOURCE = "operations/ActivationKernel.mm"
GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def activate(release: Release, output: Tensor, self: Tensor, *, kernel: str) -> None:
    """The kernel of one operand of a floating dtype."""
    if not self.is_floating_point():
        raise NoRule("no numbers of a floating dtype")
    exec_unary(release, output, self, kernel)


def differentiate(release: Release, result: Tensor, gradient: Tensor, self: Tensor, *, kernel: str) -> None:
    """The kernel of a gradient and the operand."""
    exec_binary(release, result, gradient, self, kernel)


for _name in ("silu", "hardswish", "hardsigmoid", "mish"):
    out_rule(_name, source=SOURCE, outputs=as_input, kernel=_name)(activate)
for _name in ("silu", "hardswish", "hardsigmoid", "mish", "sigmoid"):
    out_rule(f"{_name}_backward", source=SOURCE, outputs=as_common, kernel=f"{_name}_backward")(differentiate)


@out_rule("relu", source="operations/Activation.mm", outputs=as_input)
def relu(release: Release, output: Tensor, self: Tensor) -> None:
    """What is positive."""
    if self.dtype == torch.bool:
        raise NoRule("PyTorch refuses the arguments: bool")
    exec_unary(release, output, self, "relu")


@out_rule("gelu", source=SOURCE, outputs=as_input)
def gelu(release: Release, output: Tensor, self: Tensor, *, approximate: str = "none") -> None:
    """Gaussian error linear unit."""
    exec_unary(release, output, self, _gelu(approximate))


@out_rule("gelu_backward", source=SOURCE, outputs=as_common)
def gelu_backward(
    release: Release, grad_input: Tensor, grad_output: Tensor, self: Tensor, *, approximate: str = "none"
) -> None:
    """Its gradient."""
    exec_binary(release, grad_input, grad_output, self, f"{_gelu(approximate)}_backward")


def _gelu(approximate: str) -> str:
    if approximate not in GELU:
        raise NoRule("PyTorch refuses the arguments: another approximation")
    return GELU[approximate]


@out_rule("hardshrink", source=SOURCE, outputs=as_input)
def hardshrink(release: Release, output: Tensor, self: Tensor, lambd: float = 0.5) -> None:
    """Zero within lambd of zero."""
    exec_unary(release, output, self, "hardshrink", alpha(lambd, self.dtype))


@out_rule("softshrink", source=SOURCE, outputs=as_input)
def softshrink(release: Release, output: Tensor, self: Tensor, lambd: float = 0.5) -> None:
    """Towards zero by lambd."""
    if lambd < 0:
        raise NoRule("PyTorch refuses the arguments: lambd below zero")
    exec_unary(release, output, self, "softshrink", alpha(lambd, self.dtype))


@out_rule("hardshrink_backward", "softshrink_backward", source=SOURCE, outputs=as_common)
def shrink_backward(
    release: Release, grad_input: Tensor, grad_output: Tensor, self: Tensor, lambd: float = 0.5
) -> None:
    """The gradient of both."""
    exec_binary(release, grad_input, grad_output, self, "shrink_backward", beside=alpha(lambd, grad_input.dtype))


@out_rule("leaky_relu", source=SOURCE, outputs=as_input)
def leaky_relu(release: Release, output: Tensor, self: Tensor, negative_slope: float = 0.01) -> None:
    """What is negative times the slope."""
    exec_unary(release, output, self, "leaky_relu", alpha(negative_slope, self.dtype))


@out_rule("leaky_relu_backward", source=SOURCE, outputs=as_common)
def leaky_relu_backward(
    release: Release,
    grad_input: Tensor,
    grad_output: Tensor,
    self: Tensor,
    negative_slope: float,
    self_is_result: bool,
) -> None:
    """Its gradient; `self` may be the result, whose sign is the same."""
    if self_is_result and negative_slope < 0:
        raise NoRule("PyTorch refuses the arguments: an in-place call with a slope below zero")
    beside = alpha(negative_slope, grad_input.dtype)
    exec_binary(release, grad_input, self, grad_output, "leaky_relu_backward", beside=beside)


@out_rule("elu", source=SOURCE, outputs=as_input)
def elu(
    release: Release, output: Tensor, self: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> None:
    """Exponential linear unit; celu and selu are it with other numbers."""
    exec_unary(release, output, self, "elu", params("ELUParams", self.dtype, alpha, scale, input_scale))


@out_rule("elu_backward", source=SOURCE, outputs=lambda target, *given: as_common(target, given[0], given[-1]))
def elu_backward(
    release: Release,
    grad_input: Tensor,
    grad_output: Tensor,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: Tensor,
) -> None:
    """Its gradient, of the input or of the result."""
    if is_result and alpha < 0:
        raise NoRule("PyTorch refuses the arguments: an in-place call with alpha below zero")
    numbers = (alpha, scale, input_scale)
    beside = params("ELUBackwardParams", grad_input.dtype, *numbers, truth=is_result)
    exec_binary(release, grad_input, grad_output, self_or_result, "elu_backward", beside=beside)


GATES = "operations/Activation.mm"


@rule("log_sigmoid_forward", source=GATES)
def log_sigmoid(release: Release, self: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and an empty buffer: only the CPU's gradient reads one."""
    output = torch.empty_like(self)
    exec_unary(release, output, self, "log_sigmoid_forward")
    return output, torch.empty(0, dtype=self.dtype, device=self.device)


@out_rule("log_sigmoid_backward", source=GATES, outputs=as_common)
def log_sigmoid_backward(
    release: Release, grad_input: Tensor, grad_output: Tensor, self: Tensor, buffer: Tensor
) -> None:
    """Its gradient, of the input alone."""
    exec_binary(release, grad_input, self, grad_output, "log_sigmoid_backward")


@out_rule("glu", source=GATES)
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


@out_rule("glu_backward", source=GATES)
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
