"""LayerNorm and RMSNorm by Metal kernels of ours, a dispatch forward and two backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.fused_step.autograd_kernels import AutogradKernel, runs
from hf_mps.layer.fused_step.model_code import ModelCode, parts_of
from hf_mps.metal.training_kernels import norms, trial
from hf_mps.metal.training_kernels.library import ordinary

OPERATORS = {
    "aten::layer_norm": AutogradKernel("_layer_norm", when="concerns_layer_norm"),
    "aten::rms_norm": AutogradKernel("_rms_norm", when="concerns_rms_norm"),
}
ROOT, OF_T5, JOINED = "llama.modeling_llama:LlamaRMSNorm", "t5.modeling_t5:T5LayerNorm", "bert.modeling_bert:BertOutput"


def _root(norm: Any, x: Tensor) -> Tensor:
    wide = x.float()
    least: Tensor = wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon
    return cast(Tensor, norm.weight * (wide * torch.rsqrt(least)).to(x.dtype))


WRITTEN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((ROOT, OF_T5), _root),
    JOINED: lambda layer, x, residual: layer.LayerNorm(layer.dropout(layer.dense(x)) + residual),
}
"""What these classes of layers do: RMSNorm under two names, and the norm behind a layer and its residual."""


class Norms(ModelCode):
    """Sends `aten::layer_norm` and `aten::rms_norm` to the kernels, and the norms that transformers writes out.

    It acts where something before the norm learns, over a last dimension with a weight.
    """

    name = "norms"
    what = "LayerNorm and RMSNorm in one kernel forward and two backward"
    why = "the price of a small launch is the host's, and RMSNorm has 18 in pieces"
    shorter = {
        f"{ROOT}.forward": "_written_out",
        f"{OF_T5}.forward": "_written_out",
        f"{JOINED}.forward": "_after_a_residual",
    }

    @property
    def patches(self) -> Mapping[str, str | Patch]:
        """The two operators; and where models are made, to find what they write out."""
        return {**OPERATORS, **super().patches}

    def words(self, model: Any, device_type: str) -> str:
        """Return what it will do for a model that has such norms, where their kernel has won its trial."""
        kinds: set[Any] = {type(each) for each in model.modules()}
        layers = any(issubclass(kind, torch.nn.LayerNorm) for kind in kinds)
        roots = any(issubclass(kind, torch.nn.RMSNorm) for kind in kinds) or self.has(kinds, ROOT, OF_T5)
        used = [name for name, there in (("layer-norm", layers), ("rms-norm", roots)) if there and trial.may_act(name)]
        named = " and ".join({"layer-norm": "LayerNorm", "rms-norm": "RMSNorm"}[name] for name in used)
        joined = self.has(kinds, JOINED) and trial.may_act("residual-norm")
        before = ", with the residual and dropout before it" if joined else ""
        return f"{named} in one kernel forward and two backward{before}" if used else ""

    def original(self, piece: str) -> Any:
        """Return what is written here."""
        return WRITTEN[piece.removesuffix(".forward")]

    def sample(self, function: Callable[..., Any]) -> list[Any]:
        """Return what a layer's `forward` makes in two dtypes where each of its parts does something else."""
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            given = torch.linspace(-2, 2, 8, dtype=dtype, device="cpu").view(2, 4)
            parts = parts_of("dense", "dropout", "LayerNorm")
            layer = SimpleNamespace(weight=given[1] + 2, variance_epsilon=0.01, **parts)
            several = len(inspect.signature(function).parameters) > 2
            found.append(function(layer, given, given.flip(-1)) if several else function(layer, given))
        return found

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
        return weight is not None and len(shape) == 1 and self._ours("layer-norm", given, weight, bias)

    def concerns_rms_norm(
        self, given: Tensor, shape: list[int], weight: Tensor | None = None, epsilon: float | None = None
    ) -> bool:
        """Return whether the kernel computes such a call, which autograd will ask for gradients of."""
        return weight is not None and len(shape) == 1 and self._ours("rms-norm", given, weight)

    def _ours(self, kernel: str, given: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        there = [each for each in (given, weight, bias) if each is not None]
        return (
            torch.is_grad_enabled()
            and any(each.requires_grad for each in there)
            and given.device.type in self.devices
            and weight.numel() <= norms.WIDEST
            and ordinary(*there)
            and trial.may_act(kernel)
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
        if not (runs(hidden) and self._ours("rms-norm", hidden, module.weight)):
            return cast(Tensor, stock(module, hidden))
        self.acts()
        return cast(Tensor, stock.foreign(norms.rms_norm, hidden, module.weight, float(module.variance_epsilon)))

    def _after_a_residual(self, stock: OriginalCall, module: Any, hidden: Tensor, residual: Tensor) -> Tensor:
        norm, dropout = module.LayerNorm, module.dropout
        plain = type(norm) is torch.nn.LayerNorm and type(dropout) is torch.nn.Dropout
        hooked = any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in (norm, dropout))
        share = dropout.p if module.training and plain else 0.0
        usual = plain and not hooked and norm.weight is not None and norm.weight.dtype == residual.dtype and share < 1
        if not (usual and runs(hidden) and not torch.is_autocast_enabled(hidden.device.type)):
            return cast(Tensor, stock(module, hidden, residual))
        given = stock.foreign(module.dense, hidden)
        alike = given.shape == residual.shape and ordinary(given, residual)
        if not (alike and self._ours("residual-norm", given, norm.weight, norm.bias)):
            return cast(Tensor, stock.foreign(norm, stock.foreign(dropout, given) + residual))
        self.acts()
        how = "layer_norm", norm.eps, share
        return cast(Tensor, stock.foreign(norms.residual_norm, *how, given, residual, norm.weight, norm.bias)[0])


NORMS = Norms()
