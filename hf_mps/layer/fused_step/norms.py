"""LayerNorm and RMSNorm by Metal kernels of ours, a dispatch forward and two backward."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from hf_mps.core.patching import OriginalCall, Patch
from hf_mps.layer.fused_step.autograd_kernels import AutogradKernel, runs
from hf_mps.layer.fused_step.model_code import CACHES, ModelCode, parts_of, watched
from hf_mps.metal.training_kernels import norms, trial
from hf_mps.metal.training_kernels.library import ordinary

OPERATORS = {
    f"aten::{name}": AutogradKernel("_operator", name, when="concerns_operator") for name in ("layer_norm", "rms_norm")
}
ROOT, OF_T5, JOINED = "llama.modeling_llama:LlamaRMSNorm", "t5.modeling_t5:T5LayerNorm", "bert.modeling_bert:BertOutput"


def _bias_and_epsilon(name: str, given: Tensor, second: Any = None, third: Any = None, *_: Any) -> tuple[Any, float]:
    """Return what a call of the operator has behind its weight: RMSNorm, which has no bias, an epsilon alone."""
    if name == "layer_norm":
        return second, 1e-5 if third is None else third
    return None, torch.finfo(given.dtype).eps if second is None else second


def _root(norm: Any, x: Tensor) -> Tensor:
    wide = x.float()
    least: Tensor = wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon
    return cast(Tensor, norm.weight * (wide * torch.rsqrt(least)).to(x.dtype))


BLOCKS = {
    "vit.modeling_vit:ViTLayer": ("layernorm_before", "attention", "layernorm_after", "dropout"),
    "llama.modeling_llama:LlamaDecoderLayer": ("input_layernorm", "self_attn", "post_attention_layernorm"),
    "clip.modeling_clip:CLIPEncoderLayer": ("layer_norm1", "self_attn", "layer_norm2"),
}
"""Blocks whose halves add something to their input: their norms, their attention between, and dropout, if any."""


def _normed(call: Any, norm: Any, drops: Any, given: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    total = functools.reduce(lambda found, drop: call(drop, found), drops, given)
    total = total if residual is None else total + residual
    return call(norm, total), total


def _block(
    names: Any, normed: Any, call: Any, layer: Any, x: Tensor, attention_mask: Any = None, **named: Any
) -> Tensor:
    """Compute a block; `normed` returns a norm and what that is made of, as `_normed` does."""
    before, attention, after, *drops = (getattr(layer, name) for name in names)
    found, x = normed(call, before, (), x)
    found, _ = call(attention, hidden_states=found, attention_mask=attention_mask, **named)
    found, x = normed(call, after, drops, found, x)
    return cast(Tensor, functools.reduce(lambda found, drop: call(drop, found), drops, call(layer.mlp, found)) + x)


WRITTEN: dict[str, Callable[..., Any]] = {
    **dict.fromkeys((ROOT, OF_T5), _root),
    JOINED: lambda layer, x, residual: layer.LayerNorm(layer.dropout(layer.dense(x)) + residual),
    **{
        block: functools.partial(_block, names, _normed, OriginalCall(_block).foreign)
        for block, names in BLOCKS.items()
    },
}
"""What these classes of layers do: RMSNorm under two names, the norm behind a layer and its residual, blocks."""


def _attended(hidden_states: Tensor, attention_mask: Tensor, **named: float) -> tuple[Tensor, None]:
    """Return what shows which words an attention is called with, a cache by either of its names."""
    weights = {name.replace(*CACHES): value for name, value in named.items()}
    return hidden_states.cos() + attention_mask + sum(len(name) * value for name, value in weights.items()), None


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
        **{f"{block}.forward": "_in_a_block" for block in BLOCKS},
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
        joined = self.has(kinds, JOINED, *BLOCKS) and trial.may_act("residual-norm")
        before = ", with the residual and dropout before it" if joined else ""
        return f"{named} in one kernel forward and two backward{before}" if used else ""

    def original(self, piece: str) -> Any:
        """Return what is written here."""
        return WRITTEN[piece.removesuffix(".forward")]

    def sample(self, function: Callable[..., Any]) -> list[Any]:
        """Return what a layer's `forward` makes in two dtypes where each of its parts does something else."""
        parameters = inspect.signature(function).parameters
        found, several = [], len(parameters)
        of_blocks = (name for names in BLOCKS.values() for name in names)
        parts: dict[str, Any] = parts_of("dense", "dropout", "LayerNorm", "mlp", *of_blocks)
        cache = CACHES[CACHES[1] in parameters]
        words = {"position_ids": 2, "use_cache": 3, cache: 5, "position_embeddings": 7, "other": 11}
        for dtype in (torch.float32, torch.bfloat16):
            given = torch.linspace(-2, 2, 8, dtype=dtype, device="cpu").view(2, 4)
            layer = SimpleNamespace(weight=given[1] + 2, variance_epsilon=0.01, **parts)
            layer.attention = layer.self_attn = _attended
            others = [] if several < 3 else [given.flip(-1)]
            found.append(function(layer, given, *others, **(words if several > 3 else {})))
        return found

    def concerns_operator(
        self, name: str, given: Tensor, shape: list[int], weight: Tensor | None = None, *rest: Any
    ) -> bool:
        """Return whether the kernel computes such a call, which autograd will ask for gradients of."""
        bias = rest[0] if rest and name == "layer_norm" else None
        return weight is not None and len(shape) == 1 and self._ours(name.replace("_", "-"), given, weight, bias)

    def _ours(self, kernel: str, given: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        there = [each for each in (given, weight, bias) if each is not None]
        # The cheapest question first: every call of the operator comes here.
        learns = torch.is_grad_enabled() and any(each.requires_grad for each in there)
        fits = learns and weight.shape == given.shape[-1:] and weight.numel() <= norms.WIDEST
        return fits and given.device.type in self.devices and ordinary(*there) and trial.may_act(kernel)

    def _operator(
        self, name: str, stock: OriginalCall, given: Tensor, shape: list[int], weight: Tensor, *rest: Any
    ) -> Tensor:
        self.acts()
        bias, epsilon = _bias_and_epsilon(name, given, *rest)
        return cast(Tensor, stock.foreign(norms.normed, name, epsilon, given, weight, bias)[0])

    def _written_out(self, stock: OriginalCall, module: Any, hidden: Tensor) -> Tensor:
        if not (runs(hidden) and self._ours("rms-norm", hidden, module.weight)):
            return cast(Tensor, stock(module, hidden))
        self.acts()
        epsilon = float(module.variance_epsilon)
        return cast(Tensor, stock.foreign(norms.normed, "rms_norm", epsilon, hidden, module.weight)[0])

    def _after_a_residual(self, stock: OriginalCall, module: Any, hidden: Tensor, residual: Tensor) -> Tensor:
        if not self._computes(hidden):
            return cast(Tensor, stock(module, hidden, residual))
        given = stock.foreign(module.dense, hidden)
        return cast(Tensor, self._beside(stock.foreign, module.LayerNorm, (module.dropout,), given, residual)[0])

    def _in_a_block(self, stock: OriginalCall, module: Any, *given: Any, **named: Any) -> Any:
        names = next(names for names in BLOCKS.values() if names[0] in module._modules)
        if len(given) not in (1, 2) or not self._computes(given[0]) or watched(getattr(module, names[1])):
            return stock(module, *given, **named)
        return _block(names, self._beside, stock.foreign, module, *given, **named)

    def _computes(self, hidden: Tensor) -> bool:
        return self.trains(hidden) and not torch.is_autocast_enabled(hidden.device.type)

    def _beside(self, call: Any, norm: Any, drops: Any, given: Tensor, residual: Tensor | None = None) -> Any:
        """Return the norm of `given`, or of what dropout leaves of it and a residual, and what that is made of."""
        centered, root = type(norm) is torch.nn.LayerNorm, self.is_copy(type(norm).forward, f"{ROOT}.forward")
        plain = all(type(drop) is torch.nn.Dropout and not watched(drop) for drop in drops)
        share = max((drop.p for drop in drops if drop.training), default=0.0) if plain else 1.0
        usual = (centered or root) and norm.weight is not None and share < 1 and not watched(norm)
        name, bias = ("layer_norm", norm.bias) if centered else ("rms_norm", None)
        if residual is None:
            kernel, usual = name.replace("_", "-"), usual and given.requires_grad
        else:
            kernel, usual = "residual-norm", usual and given.shape == residual.shape and ordinary(given, residual)
        if not (usual and self._ours(kernel, given, norm.weight, bias)):
            return _normed(call, norm, drops, given, residual)
        self.acts()
        epsilon = float(norm.eps if centered else norm.variance_epsilon)
        return call(norms.normed, name, epsilon, given, norm.weight, bias, residual, share)


NORMS = Norms()
