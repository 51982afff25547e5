"""Gradients are clipped and zeroed as a few long tensors, where stock launches for each of them.

What is known here is torch/nn/utils/clip_grad.py: `clip_grad_norm_` is `_get_total_norm`, then
`_clip_grads_with_norm_`, which ask for a norm and a product of each gradient on devices without foreach kernels, Metal
among them. Both are given the same elements in fewer tensors and do the rest, so that what they raise and return stays
theirs. Accelerate, Trainer and Lightning clip through them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import GeneratorType, SimpleNamespace
from typing import Any

from hf_mps.step import spans
from hf_mps.step.base import Part

CLIP = "torch.nn.utils.clip_grad"
EXPORTED = "torch.nn.utils"


class FlatGradients(Part):
    """Acts where nobody said `foreach=`: who did is taken at their word."""

    name = "flat-gradients"
    what = "small gradients in few flat buffers, each clipped and zeroed at once"
    why = "the price of a small launch is the host's, and there is one for hundreds"
    patches = {
        f"{CLIP}:clip_grad_norm_": "_clip_norm",
        f"{EXPORTED}:clip_grad_norm_": "_clip_norm",
        f"{CLIP}:_get_total_norm": "_total_norm",
        f"{EXPORTED}:get_total_norm": "_total_norm",
        f"{CLIP}:_clip_grads_with_norm_": "_scale",
        f"{EXPORTED}:clip_grads_with_norm_": "_scale",
        f"{CLIP}:clip_grad_value_": "_clip_value",
        f"{EXPORTED}:clip_grad_value_": "_clip_value",
    }

    def words(self, model: Any, device_type: str) -> str:
        """How many gradients will lie in how many buffers."""
        small = [
            each for each in model.parameters() if each.requires_grad and each.nbytes <= spans.SMALL and each.numel()
        ]
        buffers = len({each.dtype for each in small})
        if len(small) <= buffers:
            return ""
        return f"{len(small)} small gradients in {buffers} flat buffer{'s' * (buffers > 1)}"

    def _clip_norm(self, stock: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, GeneratorType):
            parameters = list(parameters) or parameters  # stock warns of a generator that is empty
        self._gather(self._gradients(parameters))
        return stock(parameters, *args, **kwargs)

    def _total_norm(
        self,
        stock: Callable[..., Any],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [tensors] if _is_tensor(tensors) else list(tensors)
        # With other orders than these the norm of norms is not the norm of all.
        if foreach is None and float(norm_type) > 0 and self._ours(given):
            given = [_norms(each, float(norm_type)) for each in spans.spans(given)]
        return stock(given, norm_type, error_if_nonfinite, foreach)

    def _scale(
        self, stock: Callable[..., Any], parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None
    ) -> Any:
        return stock(self._long(parameters, foreach), max_norm, total_norm, foreach)

    def _clip_value(
        self, stock: Callable[..., Any], parameters: Any, clip_value: float, foreach: bool | None = None
    ) -> Any:
        return stock(self._long(parameters, foreach), clip_value, foreach)

    def _long(self, parameters: Any, foreach: bool | None) -> Any:
        """Something with the gradients of `parameters` as few long tensors, where that is ours to do."""
        if isinstance(parameters, GeneratorType):
            parameters = list(parameters)
        gradients = self._gradients(parameters)
        if foreach is not None or not self._ours(gradients):
            return parameters
        self.acts()
        self._gather(gradients)
        return [SimpleNamespace(grad=each) for each in spans.spans(gradients)]

    def _gather(self, gradients: list[Any]) -> None:
        if self._ours(gradients):
            spans.gather(gradients)

    def _ours(self, gradients: list[Any]) -> bool:
        """Whether there are several, all of them ordinary ones on a device that is ours."""
        return len(gradients) > 1 and all(spans.plain(each) and each.device.type in self.devices for each in gradients)

    @staticmethod
    def _gradients(parameters: Any) -> list[Any]:
        parameters = [parameters] if _is_tensor(parameters) else parameters
        return [each.grad for each in parameters if each.grad is not None] if isinstance(parameters, list) else []


def _norms(tensor: Any, order: float) -> Any:
    """The norms of the rows of a long tensor: of these stock takes the norm. A short one is returned as it is."""
    import torch

    if tensor.dim() != 1 or tensor.numel() <= spans.ROW:
        return tensor
    whole = tensor.numel() // spans.ROW * spans.ROW
    with torch.no_grad():
        norms = torch.linalg.vector_norm(tensor[:whole].view(-1, spans.ROW), order, dim=1)
        if whole == tensor.numel():
            return norms
        return torch.cat((norms, torch.linalg.vector_norm(tensor[whole:], order).view(1)))


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


PART = FlatGradients()
