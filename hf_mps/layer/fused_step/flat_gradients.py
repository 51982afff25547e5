"""Gradients are clipped and zeroed as a few long tensors, where stock launches for each of them.

What is known here is torch/nn/utils/clip_grad.py: `clip_grad_norm_` is `_get_total_norm`, then
`_clip_grads_with_norm_`, which ask for a norm and a product of each gradient on devices without foreach kernels, Metal
among them; and `zero_grad(set_to_none=False)`, which fills each. They are given the same elements in fewer tensors and
do the rest, so that what they raise and return stays theirs. Where their sums over one tensor would be launches for
nothing, its norm and the factor are written out here. Each long tensor is multiplied by itself: GradScaler's kernel for
a list dispatches each tensor too, with 64 threads a threadgroup (MultiTensorApply.h). Accelerate, Trainer and Lightning
clip through them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from types import GeneratorType, SimpleNamespace
from typing import Any

import torch

from hf_mps.layer.fused_step import constants, spans
from hf_mps.layer.fused_step.base import Part

CLIP = "torch.nn.utils.clip_grad"
EXPORTED = "torch.nn.utils"


class FlatGradients(Part):
    """Acts where nobody said `foreach=`: who did is taken at their word."""

    name = "flat-gradients"
    what = "small gradients lie in few flat buffers, each clipped and zeroed at once"
    why = "the price of a small launch is the host's, and there is one for dozens of gradients"
    patches = {
        f"{CLIP}:clip_grad_norm_": "_clip_norm",
        f"{EXPORTED}:clip_grad_norm_": "_clip_norm",
        # The private ones too: a program that imported clip_grad_norm_ by name before has stock's, which calls these.
        f"{CLIP}:_get_total_norm": "_total_norm",
        f"{EXPORTED}:get_total_norm": "_total_norm",
        f"{CLIP}:_clip_grads_with_norm_": "_scale",
        f"{EXPORTED}:clip_grads_with_norm_": "_scale",
        f"{CLIP}:clip_grad_value_": "_clip_value",
        f"{EXPORTED}:clip_grad_value_": "_clip_value",
        "torch.optim:Optimizer.zero_grad": "_optimizer_zeroes",
        "torch.nn:Module.zero_grad": "_module_zeroes",
    }

    def __init__(self) -> None:
        super().__init__()
        self._now: tuple[list[Any], list[Any]] | None = None

    def words(self, model: Any, device_type: str) -> str:
        """Return how many gradients will lie in how many buffers."""
        sizes: dict[Any, list[int]] = {}
        for each in model.parameters():
            if each.requires_grad and 0 < each.nbytes <= spans.SMALL:
                sizes.setdefault(each.dtype, []).append(each.nbytes)
        count = sum(map(len, sizes.values()))
        buffers = sum(-(-sum(kind) // spans.BUFFER) for kind in sizes.values())
        return f"{count} small gradients in {buffers} flat buffer{'s' * (buffers > 1)}" if count > buffers else ""

    def _clip_norm(self, stock: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(parameters, GeneratorType):
            parameters = list(parameters) or parameters  # stock warns of a generator that is empty
        gradients = _gradients(parameters)
        if not self._ours(gradients):
            return stock(parameters, *args, **kwargs)
        self._now = gradients, self._long(gradients)
        try:
            return stock(parameters, *args, **kwargs)
        finally:
            self._now = None

    def _total_norm(
        self,
        stock: Callable[..., Any],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        # Of other orders than these the norm of norms is not the norm of all. What is no gradient stays where it is.
        if foreach is None and float(norm_type) > 0:
            known = self._known(given)
            if known or self._ours(given):
                given = _norms(known or spans.spans(given), float(norm_type))
                if len(given) == 1 and not error_if_nonfinite:  # stock takes the norm of that norm, twice
                    return torch.linalg.vector_norm(given[0], float(norm_type))
        return stock(given, norm_type, error_if_nonfinite, foreach)

    def _scale(
        self, stock: Callable[..., Any], parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None
    ) -> Any:
        carriers = self._carriers(parameters, foreach)
        long = [each.grad for each in carriers] if carriers is not parameters else []
        # A norm of float32 beside all of the long tensors, to be held under a number.
        plain = isinstance(max_norm, int | float) and type(total_norm) is torch.Tensor and not total_norm.requires_grad
        plain = plain and bool(long) and total_norm.dim() == 0 and total_norm.dtype == torch.float32
        if not plain or {each.device for each in long} != {total_norm.device}:
            return stock(carriers, max_norm, total_norm, foreach)
        # Stock's factor; a limit on the device is divided by in one launch, a number in two.
        limit = constants.number(float(max_norm), torch.float32, total_norm.device)
        factor = torch.clamp(limit / (total_norm + 1e-6), max=1.0)
        for each in long:
            each.mul_(factor)
        return None

    def _clip_value(
        self, stock: Callable[..., Any], parameters: Any, clip_value: float, foreach: bool | None = None
    ) -> Any:
        return stock(self._carriers(parameters, foreach), clip_value, foreach)

    def _carriers(self, parameters: Any, foreach: bool | None) -> Any:
        """Something with the gradients of `parameters` as few long tensors, where that is ours to do."""
        if isinstance(parameters, GeneratorType):
            parameters = list(parameters)
        gradients = _gradients(parameters)
        known = self._known(gradients)
        if foreach is not None or not (known or self._ours(gradients)):
            return parameters
        return [SimpleNamespace(grad=each) for each in known or self._long(gradients)]

    def _known(self, gradients: list[Any]) -> list[Any]:
        """Return the long tensors of these gradients, where `clip_grad_norm_` has just made them."""
        before, long = self._now or ([], [])
        same = len(before) == len(gradients) and all(map(is_, before, gradients))
        return long if same else []

    def _optimizer_zeroes(self, stock: Callable[..., Any], optimizer: Any, set_to_none: bool = True) -> Any:
        parameters = [] if set_to_none else [each for group in optimizer.param_groups for each in group["params"]]
        return stock(optimizer, set_to_none) if set_to_none or not self._zero(parameters) else None

    def _module_zeroes(self, stock: Callable[..., Any], module: Any, set_to_none: bool = True) -> Any:
        # Of a replica of DataParallel stock warns.
        ours = not set_to_none and not getattr(module, "_is_replica", False) and self._zero(list(module.parameters()))
        return None if ours else stock(module, set_to_none)

    def _zero(self, parameters: list[Any]) -> bool:
        """Zero gradients at once; False where that is not ours to do."""
        gradients = _gradients(parameters)
        if not self._ours(gradients):
            return False
        for each in self._long(gradients):
            each.zero_()
        return True

    def _long(self, gradients: list[Any]) -> list[Any]:
        self.acts()
        return spans.gather(gradients)

    def _ours(self, gradients: list[Any]) -> bool:
        """Whether there are several, each ordinary, on a device that is ours and named once: stock clips twice else."""
        several = len(set(map(id, gradients))) == len(gradients) > 1
        if not several or not all(map(spans.plain, gradients)):
            return False
        return {each.device.type for each in gradients} <= self.devices


def _norms(long: Sequence[Any], order: float) -> list[Any]:
    """Tensors, one for each dtype and device, whose norm is that of `long`: of these stock takes the norm."""
    kinds: dict[tuple[Any, Any], list[Any]] = {}
    for each in long:
        kinds.setdefault((each.device, each.dtype), []).append(each)
    with torch.no_grad():
        return [spans.norms(several, order) for several in kinds.values()]


def _gradients(parameters: Any) -> list[Any]:
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    if not isinstance(parameters, list | tuple):
        return []
    return [each.grad for each in parameters if each.grad is not None]


FLAT_GRADIENTS = FlatGradients()
