"""LayerNorm and RMSNorm by Metal kernels of ours, a dispatch forward and two backward."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.fused_step.autograd_kernels import AutogradKernel, runs
from hf_mps.layer.fused_step.base import Part
from hf_mps.layer.fused_step.marked import MODELS, marked
from hf_mps.metal.training_kernels import norms, trial
from hf_mps.metal.training_kernels.library import ordinary

MADE = "transformers.modeling_utils"
T5 = "T5LayerNorm"
"""How the classes of T5 and its relatives end that are an RMSNorm under another name, as their docstring says."""
KERNELS = {"layer_norm": "layer-norm", "rms_norm": "rms-norm"}


class Norms(Part):
    """Sends `aten::layer_norm` and `aten::rms_norm` to the kernels, and the norms that transformers writes out.

    It acts where something before the norm learns, over a last dimension with a weight.
    """

    name = "norms"
    what = "LayerNorm and RMSNorm in one kernel forward and two backward"
    why = "the price of a small launch is the host's, and RMSNorm has 18 in pieces"
    patches = {
        "aten::layer_norm": AutogradKernel("_layer_norm", when="concerns_layer_norm"),
        "aten::rms_norm": AutogradKernel("_rms_norm", when="concerns_rms_norm"),
        f"{MADE}:PreTrainedModel.post_init": Patch("_made"),
    }

    def __init__(self) -> None:
        super().__init__()
        self._found: set[type] = set()

    def words(self, model: Any, device_type: str) -> str:
        """Return what it will do for a model that has such norms, where their kernel has won its trial."""
        kinds = {type(each) for each in model.modules()}
        layers = any(issubclass(kind, torch.nn.LayerNorm) for kind in kinds)
        roots = any(issubclass(kind, torch.nn.RMSNorm) or _writes_out(kind) for kind in kinds)
        used = [name for name, there in (("layer-norm", layers), ("rms-norm", roots)) if there and trial.may_act(name)]
        named = " and ".join({"layer-norm": "LayerNorm", "rms-norm": "RMSNorm"}[name] for name in used)
        return f"{named} in one kernel forward and two backward" if used else ""

    def install(self, module: ModuleType) -> None:
        """Also look through the models that were imported before."""
        super().install(module)
        if module.__name__ == MADE:
            for name, imported in tuple(sys.modules.items()):
                if name.startswith(MODELS) and ".modeling_" in name:
                    self._look_through(kind for kind in tuple(vars(imported).values()) if isinstance(kind, type))

    def wrapped(self, where: str, stock: Any, wrapper: Any) -> Any:
        """A model is looked through as it is made even while the part is off, which may be switched on for it later."""
        owner = SimpleNamespace(on=True, failed=self.failed) if wrapper == self._made else self
        return self.answered(owner, where, stock, wrapper)

    def concerns_layer_norm(
        self,
        given: Tensor,
        shape: list[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        epsilon: float = 1e-5,
        cudnn: bool = True,
    ) -> bool:
        """Return whether the kernel computes such a call, which autograd will ask for gradients of."""
        return weight is not None and len(shape) == 1 and self._ours("layer_norm", given, weight, bias)

    def concerns_rms_norm(
        self, given: Tensor, shape: list[int], weight: Tensor | None = None, epsilon: float | None = None
    ) -> bool:
        """Return whether the kernel computes such a call, which autograd will ask for gradients of."""
        return weight is not None and len(shape) == 1 and self._ours("rms_norm", given, weight)

    def _ours(self, name: str, given: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        there = [each for each in (given, weight, bias) if each is not None]
        return (
            torch.is_grad_enabled()
            and any(each.requires_grad for each in there)
            and given.device.type in self.devices
            and weight.numel() <= norms.WIDEST
            and ordinary(*there)
            and trial.may_act(KERNELS[name])
        )

    def _layer_norm(
        self,
        stock: OriginalCall,
        given: Tensor,
        shape: list[int],
        weight: Tensor,
        bias: Tensor | None = None,
        epsilon: float = 1e-5,
        cudnn: bool = True,
    ) -> Tensor:
        self.acts()
        return cast(Tensor, stock.foreign(norms.layer_norm, given, weight, bias, epsilon))

    def _rms_norm(
        self, stock: OriginalCall, given: Tensor, shape: list[int], weight: Tensor, epsilon: float | None = None
    ) -> Tensor:
        self.acts()
        least = torch.finfo(given.dtype).eps if epsilon is None else epsilon
        return cast(Tensor, stock.foreign(norms.rms_norm, given, weight, least))

    def _written_out(self, stock: OriginalCall, module: Any, hidden: Tensor) -> Tensor:
        if not (runs(hidden) and self._ours("rms_norm", hidden, module.weight)):
            return cast(Tensor, stock(module, hidden))
        self.acts()
        return cast(Tensor, stock.foreign(norms.rms_norm, hidden, module.weight, float(module.variance_epsilon)))

    def _made(self, stock: OriginalCall, model: Any, *args: Any, **kwargs: Any) -> Any:
        self._look_through({type(each) for each in model.modules()})
        return stock(model, *args, **kwargs)

    def _look_through(self, kinds: Any) -> None:
        for kind in kinds:
            if kind not in self._found and _writes_out(kind):
                self._found.add(kind)
                self.around(kind, "forward", self._written_out)


def _writes_out(kind: type) -> bool:
    """Return whether a class of transformers' layers is an RMSNorm with a weight and an epsilon, in pieces."""
    if not kind.__module__.startswith(MODELS) or "forward" not in vars(kind):
        return False
    return kind.__name__.endswith(T5) or marked(kind, "RMSNorm")


NORMS = Norms()
