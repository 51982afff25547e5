"""Gradients' norm and clipping by a Metal kernel of ours, which reads and scales many of them in one dispatch.

What is known here is torch/nn/utils/clip_grad.py: Accelerate, Trainer and Lightning clip through its `clip_grad_norm_`,
which is a norm and then a product, one launch for each gradient on Metal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_mps.layer.fused_step import spans
from hf_mps.layer.fused_step.switch import Part
from hf_mps.metal.training_kernels import clip, trial
from hf_mps.metal.training_kernels.library import TYPES

KERNEL = "clip"
CLIP, EXPORTED = "torch.nn.utils.clip_grad", "torch.nn.utils"


class GradientClip(Part):
    """Acts where nobody said `foreach=` or asked for an error, for several gradients of one dtype and device."""

    name = "gradient-clip"
    what = f"gradients are clipped {clip.BOUND} at a time"
    why = "the price of a small launch is the host's, and clipping has two for each weight"
    patches = {
        # What `clip_grad_norm_` is made of, so that what that raises and returns, and who wraps it, stays.
        f"{CLIP}:_get_total_norm": "_norm",
        f"{EXPORTED}:get_total_norm": "_norm",
        f"{CLIP}:_clip_grads_with_norm_": "_scale",
        f"{EXPORTED}:clip_grads_with_norm_": "_scale",
    }

    def words(self, model: Any, device_type: str) -> str:
        """Return how many gradients there are, where several are and the kernel has won its trial."""
        count = sum(each.requires_grad for each in model.parameters())
        return f"{count} {self.what}" if count > 1 and trial.may_act(KERNEL) else ""

    def _norm(
        self,
        stock: Callable[..., Any],
        tensors: Any,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if foreach is None and not error_if_nonfinite and float(norm_type) == 2.0 and self._ours(given):
            self.acts()
            return clip.total_norm(given)
        return stock(given, norm_type, error_if_nonfinite, foreach)

    def _scale(
        self, stock: Callable[..., Any], parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None
    ) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        gradients = [each.grad for each in parameters if each.grad is not None]
        if foreach is None and type(max_norm) in (int, float) and self._ours([*gradients, total_norm]):
            self.acts()
            return clip.scale(gradients, max_norm, total_norm)
        return stock(parameters, max_norm, total_norm, foreach)

    def _ours(self, tensors: list[Any]) -> bool:
        """Return whether there are several, each once, that the kernel takes."""
        # Stock scales one that is named twice two times.
        if not len(set(map(id, tensors))) == len(tensors) > 1 or torch.compiler.is_compiling():
            return False
        kind = tensors[0].dtype, tensors[0].device
        if kind[1].type not in self.devices or kind[0] not in TYPES:
            return False
        alike = all(spans.plain(each) and spans.dense(each) and (each.dtype, each.device) == kind for each in tensors)
        return alike and trial.may_act(KERNEL)


GRADIENT_CLIP = GradientClip()
