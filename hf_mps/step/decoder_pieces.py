"""The norm and the rotation of Llama, T5 and their relatives in fewer operators: their gradients are written out."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_mps.core.stock import Stock
from hf_mps.step import side_by_side
from hf_mps.step.autograd_kernels import runs
from hf_mps.step.model_code import MODELS, ModelCode

Pair = tuple[Tensor, Tensor]
NORMS = ("llama.modeling_llama:LlamaRMSNorm.forward", "t5.modeling_t5:T5LayerNorm.forward")
"""The same formula in two ways of writing it, as far as hidden states and weight have one dtype."""


class DecoderPieces(ModelCode):
    """Llama's RMSNorm launches 11 operators in place of 18 where its weight is frozen, and its rotation 16 of 28,
    or 8 where one product makes queries and keys.

    PyTorch has one Metal kernel for RMSNorm's forward pass and none for its gradient (aten::_fused_rms_norm_backward),
    and that kernel does not give out what the gradient needs.
    """

    name = "decoder-pieces"
    what = "norms and rotations of Llama's kind in fewer operators"
    why = "the price of a small launch is the host's"
    shorter = {**dict.fromkeys(NORMS, "_normed"), "llama.modeling_llama:apply_rotary_pos_emb": "_rotated"}

    def __init__(self) -> None:
        super().__init__()
        self._signed = WeakTensorKeyDictionary()  # a step's sines -> those with which halves are exchanged

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a model that has neither."""
        kinds = {type(each) for each in model.modules() if type(each).__name__.endswith(("RMSNorm", "LayerNorm"))}
        theirs = (kind.forward for kind in kinds if kind.__module__.startswith(MODELS))
        copies = (self.is_copy(forward, norm) for forward in theirs for norm in NORMS)
        return self.what if any(copies) else ""

    def _normed(self, stock: Stock, module: Any, hidden: Tensor) -> Tensor:
        if not (self._trains(hidden, module.weight) and hidden.dtype == module.weight.dtype):
            return cast(Tensor, stock(module, hidden))
        self.acts()
        return cast(Tensor, stock.theirs(_Norm.apply, hidden, module.weight, module.variance_epsilon))

    def _rotated(
        self, stock: Stock, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Pair:
        known = cos.shape == sin.shape and cos.dim() == 3 and not (cos.requires_grad or sin.requires_grad)
        fits = known and query.shape[-1] == key.shape[-1] == cos.shape[-1] and query.shape[-1] % 2 == 0
        if not (fits and self._trains(query, key) and query.dtype == key.dtype == cos.dtype == sin.dtype):
            return cast(Pair, stock(query, key, cos, sin, unsqueeze_dim))
        self.acts()
        signed, back = (each.unsqueeze(unsqueeze_dim) for each in self._of(sin))
        return cast(Pair, stock.theirs(_Rotation.apply, query, key, cos.unsqueeze(unsqueeze_dim), signed, back))

    def _trains(self, first: Any, second: Any) -> bool:
        return (
            runs(first)
            and first.device.type in self.devices
            and second.device == first.device
            and torch.is_grad_enabled()
            and (first.requires_grad or second.requires_grad)
        )

    def _of(self, sin: Tensor) -> Pair:
        """`sin` with the first half negative, and with the second half, exchanged; once for all layers of a step."""
        kept: Any = self._signed
        version, pair = kept.get(sin, (None, None))
        if version != sin._version:
            first, second = sin.chunk(2, -1)
            negative = first.neg()
            pair = torch.cat((negative, second), -1), torch.cat((second, negative), -1)
            kept[sin] = sin._version, pair
        return cast(Pair, pair)


class _Norm(torch.autograd.Function):
    """weight * hidden / sqrt(mean(hidden^2) + epsilon), in float32 but for the product with the weight, as Llama's."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            whole = hidden.to(torch.float32)
            inverse = (whole * whole).mean(-1, keepdim=True).add_(epsilon).rsqrt_()
            normed = whole * inverse
            result = weight * normed.to(hidden.dtype)
        ctx.save_for_backward(hidden, weight, normed, inverse)
        ctx.epsilon = epsilon
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        hidden, weight, normed, inverse = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            if torch.is_grad_enabled():
                whole = hidden.to(torch.float32)
                again = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + ctx.epsilon)
                result = weight * again.to(hidden.dtype)
                return (*torch.autograd.grad(result, (hidden, weight), upstream, create_graph=True), None)
            of_weight = of_hidden = None
            if ctx.needs_input_grad[1]:
                of_weight = (upstream * normed.to(hidden.dtype)).sum(tuple(range(upstream.dim() - 1)))
            if ctx.needs_input_grad[0]:
                arriving = (upstream * weight).to(torch.float32)
                # What moves along the row changes its length, which the norm takes out again.
                along = (arriving * normed).mean(-1, keepdim=True)
                of_hidden = (arriving - normed * along).mul_(inverse).to(hidden.dtype)
        return of_hidden, of_weight, None


class _Rotation(torch.autograd.Function):
    """x * cos + exchanged(x) * signed, of queries and keys; `signed` has the sign that Llama gives the half of x."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, signed: Tensor, back: Tensor) -> Pair:
        ctx.save_for_backward(cos, back)
        return _both_turned(query, key, cos, signed)

    @staticmethod
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> Any:
        cos, back = ctx.saved_tensors
        return *_both_turned(of_query, of_key, cos, back), None, None, None


def _both_turned(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> Pair:
    """Queries and keys, at once where one product made them: the heads of both lie side by side in each place."""
    whole = None if torch.is_grad_enabled() else side_by_side.joined((query, key), 1)
    if whole is None:
        return _turned(query, cos, sin), _turned(key, cos, sin)
    first, second = side_by_side.pieces(_turned(whole, cos, sin), (query.shape[1], key.shape[1]), 1)
    return first, second


def _turned(given: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = given.chunk(2, -1)
    return given * cos + torch.cat((second, first), -1) * sin


PART = DecoderPieces()
