"""The rotation of Llama and its relatives in fewer operators: its gradient is written out."""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_mps.core.original_call import OriginalCall
from hf_mps.layer.fused_step import constants, spans
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.model_code import MODELS, ModelCode
from hf_mps.metal.training_kernels import rotary, trial

Pair = tuple[Tensor, Tensor]
ROTATION = "llama.modeling_llama:apply_rotary_pos_emb"


class DecoderPieces(ModelCode):
    """Llama's rotation is a kernel of ours, a dispatch each way; or 16 operators for 28, 8 where one product made both.

    With `addcmul` it would launch one less and cost more: that is an MPSGraph, a product and a sum are Metal kernels.
    """

    name = "decoder-pieces"
    what = "rotations of Llama's kind in fewer operators"
    why = "the price of a small launch is the host's"
    shorter = {ROTATION: "_rotated"}

    def __init__(self) -> None:
        super().__init__()
        self._signed = WeakTensorKeyDictionary()  # a step's sines -> those with which halves are exchanged

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a model that rotates in another way."""
        modules = {sys.modules[type(each).__module__] for each in model.modules()}
        theirs = (vars(each).get("apply_rotary_pos_emb") for each in modules if each.__name__.startswith(MODELS))
        return self.what if any(found is not None and self.is_copy(found, ROTATION) for found in theirs) else ""

    def _rotated(
        self, stock: OriginalCall, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> Pair:
        known = cos.shape == sin.shape and cos.dim() == 3 and not (cos.requires_grad or sin.requires_grad)
        fits = known and query.shape[-1] == key.shape[-1] == cos.shape[-1] and query.shape[-1] % 2 == 0
        learns = fits and self._ours(query, key) and (query.requires_grad or key.requires_grad)
        if not (learns and query.dtype == key.dtype == cos.dtype == sin.dtype):
            return cast(Pair, stock(query, key, cos, sin, unsqueeze_dim))
        self.acts()
        if unsqueeze_dim == 1 and rotary.takes(query, key, cos) and trial.may_act("rotary"):
            return cast(Pair, stock.foreign(rotary.rotated, query, key, cos, sin))
        signed, back = (each.unsqueeze(unsqueeze_dim) for each in self._of(sin))
        return cast(Pair, stock.foreign(_Rotation.apply, query, key, cos.unsqueeze(unsqueeze_dim), signed, back))

    def _ours(self, first: Any, second: Any) -> bool:
        there = runs(first) and first.device.type in self.devices and second.device == first.device
        return there and torch.is_grad_enabled()

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
