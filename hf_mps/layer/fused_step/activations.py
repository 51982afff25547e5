"""Activations by Metal kernels of ours: GELU with the bias before it, and gated units as Llama's, one each way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from hf_mps.core.patching import OriginalCall, Patch
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.model_code import MADE, MODELS, ModelCode, parts_of, watched
from hf_mps.metal.training_kernels import activations, trial
from hf_mps.metal.training_kernels.library import ordinary

GATED, DENSE, FIRST = "llama.modeling_llama:LlamaMLP", "bert.modeling_bert:BertIntermediate", "vit.modeling_vit:ViTMLP"
ACTIVATION = {GATED: "act_fn", DENSE: "intermediate_act_fn", FIRST: "activation_fn"}
"""What the layers that have a shorter way call their activation."""
WRITTEN: dict[str, Callable[[Any, Any], Any]] = {
    GATED: lambda layer, x: layer.down_proj(layer.act_fn(layer.gate_proj(x)) * layer.up_proj(x)),
    DENSE: lambda layer, x: layer.intermediate_act_fn(layer.dense(x)),
    FIRST: lambda layer, x: layer.fc2(layer.activation_fn(layer.fc1(x))),
}
"""What these layers do; three models need not be imported to know a fourth by it."""
KINDS = {
    "GELUActivation": "gelu",
    "GELUTanh": "tanh",
    "NewGELUActivation": "tanh",
    "FastGELUActivation": "tanh",
    "QuickGELUActivation": "quick",
    "SiLUActivation": "silu",
    "SiLU": "silu",
}
"""The classes of torch and transformers.activations that compute what the kernels do."""
IN_PIECES = ("NewGELUActivation", "FastGELUActivation", "QuickGELUActivation")
"""Those that transformers writes as three to nine operators."""


class Activations(ModelCode):
    """Takes the place of `act(dense(x))` and `act(gate(x)) * up(x)` in models that compute as BERT, ViT or Llama do.

    And of activations that transformers writes in pieces, wherever they are. It acts where gradients are wanted. Layers
    are called as the model calls them, with what PEFT or a hook has put around them; but a plain linear layer's bias is
    the kernel's, which sums its gradient too.
    """

    name = "activations"
    what = "GELU with the bias before it, and gated units, in one kernel each way"
    why = "the price of a small launch is the host's, and GPT-2's activation has 19 in pieces"
    shorter = {f"{GATED}.forward": "_gated", f"{DENSE}.forward": "_dense", f"{FIRST}.forward": "_first"}

    @property
    def patches(self) -> Mapping[str, str | Patch]:
        """Also the activations that are in pieces."""
        pieces = {f"transformers.activations:{kind}.forward": Patch("_in_pieces", after=MADE) for kind in IN_PIECES}
        return {**super().patches, **pieces}

    def words(self, model: Any, device_type: str) -> str:
        """Return what it will do for a model that has such layers, where their kernel has won its trial."""
        layers = list(model.modules())
        gelu = self._has(layers, DENSE, FIRST) or any(type(each).__name__ in IN_PIECES for each in layers)
        used = [name for name, there in (("gelu", gelu), ("swiglu", self._has(layers, GATED))) if there]
        named = {"gelu": "GELU", "swiglu": "gated units"}
        found = " and ".join(named[name] for name in used if trial.may_act(name))
        return f"{found} in one kernel each way" if found else ""

    def _has(self, layers: list[Any], *pieces: str) -> bool:
        # First the module: diffusers' models warn of an attribute that is read.
        theirs = [each for each in layers if type(each).__module__.startswith(MODELS)]
        return any(
            self.has({type(each) for each in theirs if _kind(getattr(each, ACTIVATION[piece], None))}, piece)
            for piece in pieces
        )

    def original(self, piece: str) -> Any:
        """Return what is written here."""
        return WRITTEN[piece.removesuffix(".forward")]

    def sample(self, function: Callable[..., Any]) -> list[Any]:
        """Return what a layer's `forward` makes where each of its parts does something else."""
        names = ("gate_proj", "up_proj", "down_proj", "dense", "fc1", "fc2", *ACTIVATION.values())
        return [function(SimpleNamespace(**parts_of(*names)), torch.linspace(-2, 2, 8, device="cpu"))]

    def _gated(self, stock: OriginalCall, module: Any, *given: Any, **named: Any) -> Any:
        kind = _kind(module.act_fn)
        if not (kind and self._trains("swiglu", given, named)):
            return stock(module, *given, **named)
        gate, up = (stock.foreign(layer, *given) for layer in (module.gate_proj, module.up_proj))
        if all(map(runs, (gate, up))) and activations.takes(gate, up) and (gate.requires_grad or up.requires_grad):
            self.acts()
            product = stock.foreign(activations.gated, gate, up, kind)
        else:
            product = stock.foreign(module.act_fn, gate) * up
        return stock.foreign(module.down_proj, product)

    def _dense(self, stock: OriginalCall, module: Any, *given: Any, **named: Any) -> Any:
        found = self._activated(stock, module.dense, module.intermediate_act_fn, given, named)
        return stock(module, *given, **named) if found is None else found

    def _first(self, stock: OriginalCall, module: Any, *given: Any, **named: Any) -> Any:
        found = self._activated(stock, module.fc1, module.activation_fn, given, named)
        return stock(module, *given, **named) if found is None else stock.foreign(module.fc2, found)

    def _activated(
        self, stock: OriginalCall, layer: Any, act: Any, given: tuple[Any, ...], named: dict[str, Any]
    ) -> Tensor | None:
        """Return the activation of a linear layer's result, or None where it is no plain one that learns."""
        kind, plain = _kind(act), type(layer) is nn.Linear and not watched(layer)
        bias = layer.bias if plain else None
        if not (kind and type(bias) is nn.Parameter and bias.requires_grad and self._trains("gelu", given, named)):
            return None
        self.acts()
        product = stock.foreign(linear, *given, layer.weight)
        # Under autocast the product is in its dtype; the bias follows, as the weight did.
        shift = bias.to(product.dtype)
        if not ordinary(product, shift):
            return cast(Tensor, stock.foreign(act, product + shift))
        return cast(Tensor, stock.foreign(activations.activated, product, shift, kind))

    def _in_pieces(self, stock: OriginalCall, module: Any, *given: Any, **named: Any) -> Any:
        if not (self._trains("gelu", given, named) and given[0].requires_grad and ordinary(given[0])):
            return stock(module, *given, **named)
        self.acts()
        return stock.foreign(activations.activated, given[0], None, KINDS[type(module).__name__])

    def _trains(self, kernel: str, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """Return whether a layer is called with one tensor, where gradients are wanted, and its kernel may act."""
        return len(given) == 1 and not named and self.trains(given[0]) and trial.may_act(kernel)


def _kind(act: Any) -> str:
    """Return which activation a module is that the kernels know; empty for others, and for one that is watched."""
    known = type(act).__module__ in ("transformers.activations", "torch.nn.modules.activation")
    return KINDS.get(type(act).__name__, "") if known and not watched(act) else ""


ACTIVATIONS = Activations()
