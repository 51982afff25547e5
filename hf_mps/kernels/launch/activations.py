"""Activations of networks, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_mps.kernels.launch.numbers import alpha, params
from hf_mps.kernels.launch.pointwise import exec_binary, exec_unary
from hf_mps.kernels.launch.results import as_common, as_input
from hf_mps.kernels.release import Release
from hf_mps.kernels.rules import out_rule
from hf_mps.kernels.runtime import NoRule

SOURCE = "operations/ActivationKernel.mm"
GELU = {"none": "gelu", "tanh": "gelu_tanh"}


def _declare(operator: str) -> None:
    @out_rule(operator, source=SOURCE, outputs=as_input)
    def launch(release: Release, output: Tensor, self: Tensor) -> None:
        if not self.is_floating_point():
            raise NoRule("no numbers of a floating dtype")
        exec_unary(release, output, self, operator)


def _declare_backward(operator: str) -> None:
    @out_rule(operator, source=SOURCE, outputs=as_common)
    def launch(release: Release, grad_input: Tensor, grad_output: Tensor, self: Tensor) -> None:
        exec_binary(release, grad_input, grad_output, self, operator)


for _name in ("silu", "hardswish", "hardsigmoid", "mish"):
    _declare(_name)
for _name in (
    "silu_backward",
    "hardswish_backward",
    "hardsigmoid_backward",
    "mish_backward",
    "sigmoid_backward",
):
    _declare_backward(_name)


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


def _as_leaky_relu_backward(
    target: Tensor | None, grad_output: Tensor, self: Tensor, negative_slope: float, self_is_result: bool
) -> Tensor:
    return as_common(target, self, grad_output)


@out_rule("leaky_relu_backward", source=SOURCE, outputs=_as_leaky_relu_backward)
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


def _as_elu_backward(
    target: Tensor | None,
    grad_output: Tensor,
    alpha: float,
    scale: float,
    input_scale: float,
    is_result: bool,
    self_or_result: Tensor,
) -> Tensor:
    return as_common(target, grad_output, self_or_result)


@out_rule("elu_backward", source=SOURCE, outputs=_as_elu_backward)
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
