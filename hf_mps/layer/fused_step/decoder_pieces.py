"""The rotation of Llama and its relatives in fewer operators: its gradient is written out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_mps.core.patching import OriginalCall
from hf_mps.layer.fused_step import constants, spans
from hf_mps.layer.fused_step.model_code import MODELS, ModelCode
from hf_mps.metal.training_kernels import rotary, trial

Pair = tuple[Tensor, Tensor]
ROTATION = "llama.modeling_llama:apply_rotary_pos_emb"


class DecoderPieces(ModelCode):
    """Makes Llama's rotation a kernel of ours, a dispatch each way; or 16 operators for 28, 8 where one made both."""

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

    def sample(self, function: Callable[..., Any]) -> list[Any]:
        """Return heads before and behind their places, in two dtypes: some models rotate halves in float32."""
        places, heads, width = 5, 3, 4
        found: list[Any] = []
        for dtype in (torch.float32, torch.bfloat16):
            angles = torch.linspace(0, 2, 2 * places * width, dtype=dtype, device="cpu").view(2, places, width)
            for dim, shape in ((1, (2, heads, places, width)), (2, (2, places, heads, width))):
                query = torch.linspace(-1, 1, 2 * heads * places * width, dtype=dtype, device="cpu").view(shape)
                found += function(query, query.flip(-1), angles.cos(), angles.sin(), unsqueeze_dim=dim)
        return found

    def _rotated(self, stock: OriginalCall, *args: Any, **kwargs: Any) -> Any:
        """Rotate queries and keys that are called for as Llama does; some models' functions take more, or less."""
        dim = args[4] if len(args) == 5 else kwargs.get("unsqueeze_dim", 1)
        llamas = len(args) in (4, 5) and kwargs.keys() <= {"unsqueeze_dim"} and type(dim) is int and dim in (1, 2)
        if not llamas:
            return stock(*args, **kwargs)
        query, key, cos, sin = args[:4]
        if not self._fits(query, key, cos, sin, dim):
            return stock(*args, **kwargs)
        self.acts()
        if dim == 1 and rotary.takes(query, key, cos) and trial.may_act("rotary"):
            return stock.foreign(rotary.rotated, query, key, cos, sin)
        signed, back = (each.unsqueeze(dim) for each in self._of(sin))
        return stock.foreign(_Rotation.apply, query, key, cos.unsqueeze(dim), signed, back)

    def _fits(self, query: Any, key: Any, cos: Tensor, sin: Tensor, dim: int) -> bool:
        """Return whether these train, and their whole width is rotated, at the places that the cosines are of."""
        pair = (query, key)
        return (
            all(self.trains(each) and each.dim() == 4 for each in pair)
            and (query.requires_grad or key.requires_grad)
            and not (cos.requires_grad or sin.requires_grad)
            and cos.shape == sin.shape
            and cos.dim() == 3
            and cos.shape[2] % 2 == 0
            and all((each.shape[3 - dim], each.shape[3]) == cos.shape[1:] for each in pair)
            and query.device == key.device
            and query.dtype == key.dtype == cos.dtype == sin.dtype
        )

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
    # Not `addcmul`, a launch less that costs more: it is an MPSGraph, and a product and a sum are Metal kernels.
    return given * cos + torch.cat((second, first), -1) * sin


DECODER_PIECES = DecoderPieces()
