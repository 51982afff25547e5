"""Parts of a fused step about the optimizer.

gradient-clip: gradients' norm and clipping by a Metal kernel of ours, which reads and scales many of them in one
dispatch. What is known here is torch/nn/utils/clip_grad.py: Accelerate, Trainer and Lightning clip through its
`clip_grad_norm_`, which is a norm and then a product, one launch for each gradient on Metal.

fused-optimizer: Adam, AdamW and SGD by PyTorch's fused kernels, and the step counters of all weights counted at once.
What is known here is torch/optim. Without a word about `fused` or `foreach`, PyTorch takes the way of one weight after
the other on Metal (`_default_to_fused_or_foreach` knows foreach kernels of CUDA alone), though it has fused ones; and
in those of Adam `torch._foreach_add_(state_steps, 1)` is a launch for each weight, as Metal has no foreach kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_mps.core.patching import Patch, Register
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


FEW = 4
"""Counters that are added to one by one: to look where they lie would take as long."""
WIDE = (torch.float32, torch.bfloat16)
"""Dtypes of weights whose steps are fused: of float16 the squared gradients underflow there (docs/conformance.md)."""
GROUPS = 16
"""Lists of counters that are remembered, one for each group of weights with a dtype."""


class FusedOptimizer(Part):
    """Fuses a script's optimizers, and not a recipe's: there `training.optim`, or Trainer's default, has been decided.

    Checkpoints are those of the fused optimizer, which load everywhere; a run that goes on from an unfused one's has
    its counters moved to the device, as PyTorch's own loading does for the fused. It can go when PyTorch fuses by
    default on Metal, and has a foreach kernel for counters there.
    """

    name = "fused-optimizer"
    what = "Adam, AdamW and SGD step in one fused kernel with their step counters in one buffer"
    why = "the price of a small launch is the host's, and there are one to ten for each weight"
    patches = {
        "torch.optim.optimizer:register_optimizer_step_pre_hook": Register("_steps"),
        "torch:_foreach_add_": Patch("_counted", "add_"),
        "torch:_foreach_sub_": Patch("_counted", "sub_"),
    }

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[list[int], list[Any]]] = {}

    def words(self, model: Any, device_type: str) -> str:
        """In a recipe: the counters, which every fused Adam has."""
        several = sum(each.requires_grad for each in model.parameters()) > FEW
        return "Adam's step counters in one buffer" if several else ""

    def _steps(self, optimizer: Any, *_: Any) -> None:
        if self.by_script:
            self.safely(self._fuse, optimizer)

    def _fuse(self, optimizer: Any) -> None:
        if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
            return
        for group in optimizer.param_groups:
            if group.get("fused") is not None or not self._may(group):
                continue
            self.acts()
            group["fused"] = True
            for weight in group["params"]:
                step = optimizer.state[weight].get("step") if weight in optimizer.state else None
                # The fused kernel reads the counter on the device of the weight.
                if step is not None:
                    optimizer.state[weight]["step"] = torch.as_tensor(step, dtype=torch.float32, device=weight.device)

    def _may(self, group: dict[str, Any]) -> bool:
        """Return whether nobody chose a way for a group, and the fused kernel takes all that it has."""
        if group.get("foreach") is not None or group.get("capturable") or group.get("differentiable"):
            return False
        gradients = [weight.grad for weight in group["params"] if weight.grad is not None]
        ordinary = all(spans.plain(each) and each.is_floating_point() for each in gradients)
        there = all(weight.device.type in self.devices and weight.dtype in WIDE for weight in group["params"])
        return bool(gradients) and ordinary and there

    def _counted(self, how: str, stock: Callable[..., Any], tensors: Any, by: Any, *args: Any, **kwargs: Any) -> Any:
        """One more, or, where a step that overflowed is taken back, every counter less by the same mark."""
        mark: Any = by if isinstance(by, int | float) else None
        if isinstance(by, list) and by and isinstance(by[0], torch.Tensor) and all(each is by[0] for each in by):
            mark = by[0].reshape(()) if by[0].numel() == 1 else None
        counters = None if mark is None or args or kwargs else self._counters(tensors)
        if counters is None:
            return stock(tensors, by, *args, **kwargs)
        for each in counters:
            getattr(each, how)(mark)
        return None

    def _counters(self, tensors: Any) -> list[Any] | None:
        """Counters as few long tensors, or None where these are none, or none of ours."""
        # Tensors of a trace have no place in memory.
        if len(tensors) <= FEW or not self.devices or type(tensors[0]) is not torch.Tensor:
            return None
        places = [each.data_ptr() for each in tensors if each.device.type in self.devices]
        # The long tensors keep their memory: what lies in it at the same places is what lay there before.
        known = self._known.get(places[0]) if len(places) == len(tensors) else None
        if known is None or known[0] != places:
            long = self._gathered(tensors) if places else None
            if long is None:
                return None
            while len(self._known) >= GROUPS:
                del self._known[next(iter(self._known))]
            known = [each.data_ptr() for each in tensors], long
            self._known[known[0][0]] = known
        return known[1]

    def _gathered(self, tensors: Any) -> list[Any] | None:
        scalars = all(type(each) is torch.Tensor and each.dim() == 0 and spans.plain(each) for each in tensors)
        there = {each.device.type for each in tensors} <= self.devices
        if not (scalars and there) or len(set(map(id, tensors))) < len(tensors):
            return None
        self.acts()
        long = spans.spans(tensors)
        return spans.gather(tensors) if len(long) > FEW else long


FUSED_OPTIMIZER = FusedOptimizer()
