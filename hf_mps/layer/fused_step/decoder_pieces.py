"""The norm and the rotation of Llama, T5 and their relatives in fewer operators: their gradients are written out."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.fused_step import constants, spans
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.model_code import MODELS, ModelCode

Pair = tuple[Tensor, Tensor]
NORMS = ("llama.modeling_llama:LlamaRMSNorm.forward", "t5.modeling_t5:T5LayerNorm.forward")
"""The same formula in two ways of writing it, as far as hidden states and weight have one dtype."""


class DecoderPieces(ModelCode):
    """Llama's RMSNorm launches 10 operators in place of 18 where its weight is frozen, and its rotation 16 of 28,
    or 8 where one product makes queries and keys.

    PyTorch has one Metal kernel for RMSNorm's forward pass, used where nothing before it learns, and none for its
    gradient (aten::_fused_rms_norm_backward); and that kernel does not give out what the gradient needs. With `addcmul`
    the rotation would launch one less and cost more: that is an MPSGraph, a product and a sum are Metal kernels.
    """

    name = "decoder-pieces"
    what = "norms and rotations of Llama's kind in fewer operators"
    why = "the price of a small launch is the host's"
    shorter = {**dict.fromkeys(NORMS, "_normed"), "llama.modeling_llama:apply_rotary_pos_emb": "_rotated"}

    def __init__(self) -> None:
        super().__init__()
        self._signed = WeakTensorKeyDictionary()  # a step's sines -> those with which halves are exchanged
        self._lengthened = WeakTensorKeyDictionary()  # a frozen norm's weights -> those for rows of length one

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a model that has neither."""
        kinds = {type(each) for each in model.modules() if type(each).__name__.endswith(("RMSNorm", "LayerNorm"))}
        theirs = (kind.forward for kind in kinds if kind.__module__.startswith(MODELS))
        copies = (self.is_copy(forward, norm) for forward in theirs for norm in NORMS)
        return self.what if any(copies) else ""

    def _normed(self, stock: OriginalCall, module: Any, hidden: Tensor) -> Tensor:
        weight = module.weight
        if not (self._ours(hidden, weight) and hidden.dtype == weight.dtype):
            return cast(Tensor, stock(module, hidden))
        self.acts()
        epsilon = float(module.variance_epsilon)
        if not (hidden.requires_grad or weight.requires_grad):
            if not torch.is_autocast_enabled(hidden.device.type) and hidden.dtype == torch.float32:
                return torch.rms_norm(hidden, weight.shape, weight, epsilon)
            return cast(Tensor, stock(module, hidden))
        frozen = hidden.dtype == torch.float32 and not weight.requires_grad
        return cast(Tensor, stock.foreign(_Norm.apply, hidden, weight, epsilon, self._long(weight) if frozen else None))

    def _rotated(
        self, stock: OriginalCall, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Pair:
        known = cos.shape == sin.shape and cos.dim() == 3 and not (cos.requires_grad or sin.requires_grad)
        fits = known and query.shape[-1] == key.shape[-1] == cos.shape[-1] and query.shape[-1] % 2 == 0
        learns = fits and self._ours(query, key) and (query.requires_grad or key.requires_grad)
        if not (learns and query.dtype == key.dtype == cos.dtype == sin.dtype):
            return cast(Pair, stock(query, key, cos, sin, unsqueeze_dim))
        self.acts()
        signed, back = (each.unsqueeze(unsqueeze_dim) for each in self._of(sin))
        return cast(Pair, stock.foreign(_Rotation.apply, query, key, cos.unsqueeze(unsqueeze_dim), signed, back))

    def _ours(self, first: Any, second: Any) -> bool:
        there = runs(first) and first.device.type in self.devices and second.device == first.device
        return there and torch.is_grad_enabled()

    def _long(self, weight: Tensor) -> Tensor:
        """Return a frozen weight times the root of its length; made anew when it was changed."""
        kept: Any = self._lengthened
        now = weight._version, constants.place_of(weight.device)
        before, long = kept.get(weight, (None, None))
        if before != now:
            long = weight.detach() * math.sqrt(len(weight))
            kept[weight] = now, long
        return cast(Tensor, long)

    def _of(self, sin: Tensor) -> Pair:
        """`sin` with the first half negative, and with the second half, exchanged; once for all layers of a step."""
        kept: Any = self._signed
        now = sin._version, constants.place_of(sin.device)
        before, pair = kept.get(sin, (None, None))
        if before != now:
            first, second = sin.chunk(2, -1)
            negative = first.neg()
            pair = torch.cat((negative, second), -1), torch.cat((second, negative), -1)
            kept[sin] = now, pair
        return cast(Pair, pair)


class _Norm(torch.autograd.Function):
    """weight * hidden / sqrt(mean(hidden^2) + epsilon), in float32 but for the product with the weight, as Llama's.

    Rows are divided by their length, which has epsilon in it (`hypot`). Where the weight is given as `long`, times the
    root of the width, what was divided has length one, else its mean square is one.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, epsilon: float, long: Tensor | None) -> Tensor:
        width = hidden.shape[-1]
        with torch.autocast(hidden.device.type, enabled=False):
            whole = hidden.to(torch.float32)
            least = constants.number(math.sqrt(epsilon * width), torch.float32, hidden.device)
            length = torch.linalg.vector_norm(whole, dim=-1, keepdim=True).hypot_(least)
            if long is None:
                length.mul_(1 / math.sqrt(width))
            normed = whole / length
            result: Tensor = (weight if long is None else long) * normed.to(hidden.dtype)
        ctx.save_for_backward(hidden, weight, long, normed, length)
        ctx.epsilon = epsilon
        return result

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        hidden, weight, long, normed, length = ctx.saved_tensors
        with torch.autocast(hidden.device.type, enabled=False):
            if torch.is_grad_enabled():
                whole = hidden.to(torch.float32)
                again = whole * torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + ctx.epsilon)
                result = weight * again.to(hidden.dtype)
                wanted = [each for each in (hidden, weight) if each.requires_grad]
                found = iter(torch.autograd.grad(result, wanted, upstream, create_graph=True))
                return (*(next(found) if each.requires_grad else None for each in (hidden, weight)), None, None)
            of_weight = of_hidden = None
            if ctx.needs_input_grad[1]:
                of_weight = (upstream * normed.to(hidden.dtype)).sum(tuple(range(upstream.dim() - 1)))
            if ctx.needs_input_grad[0]:
                arriving = (upstream * (weight if long is None else long)).to(torch.float32)
                # What moves along the row changes its length, which the norm takes out again.
                along = arriving * normed
                along = along.mean(-1, keepdim=True) if long is None else along.sum(-1, keepdim=True)
                of_hidden = (arriving - normed * along).div_(length).to(hidden.dtype)
        return of_hidden, of_weight, None, None


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
    whole = None if torch.is_grad_enabled() else spans.joined((query, key), 1)
    if whole is None:
        return _turned(query, cos, sin), _turned(key, cos, sin)
    first, second = spans.pieces(_turned(whole, cos, sin), (query.shape[1], key.shape[1]), 1)
    return first, second


def _turned(given: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = given.chunk(2, -1)
    return given * cos + torch.cat((second, first), -1) * sin


DECODER_PIECES = DecoderPieces()
