"""Parts of a fused step about a decoder's positions.

decoder-pieces: the rotation of Llama and its relatives in fewer operators: its gradient is written out.
fixed-positions: positions, and the cosines and sines of their rotation, kept from step to step where they are the same.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_mps.core.patching import OriginalCall
from hf_mps.layer.fused_step import constants, spans
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.model_code import CACHES, MODELS, ModelCode
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


ROTARY = "llama.modeling_llama:LlamaRotaryEmbedding.forward"
COUNTED = """
if position_ids is None:
    past_seen_tokens = cache.get_seq_length() if cache is not None else 0
    position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
    position_ids = position_ids.unsqueeze(0)
"""
"""What a model does that is given no positions, as some 160 files of transformers have it."""
KEPT = 8
"""Lengths of batches whose positions are kept, each 8 bytes a place; and rotations, two floats a place and width."""


class Rotation(NamedTuple):
    """What a rotary embedding made, and of what."""

    frequencies: Tensor
    version: int
    scaling: float
    cos: Tensor
    sin: Tensor

    def holds(self, module: Any) -> bool:
        """Return whether it would be made again with the same numbers, and nobody has written into it."""
        same = self.frequencies is module.inv_freq and self.version == module.inv_freq._version
        return same and self.scaling == module.attention_scaling and self.cos._version == self.sin._version == 0


class FixedPositions(ModelCode):
    """A model that counts its positions from zero, by the code above, is handed the ones of that length.

    By them its rotary embedding is known to be asked for the same again, unless its frequencies have changed. Positions
    that a batch brings stay a batch's.
    """

    name = "fixed-positions"
    what = "a decoder's positions and their rotation are made once for each length"
    why = "the price of a small launch is the host's, and both have a dozen, with the same numbers in each step"
    shorter = {ROTARY: "_rotation"}

    def __init__(self) -> None:
        super().__init__()
        self._positions: dict[tuple[int, torch.device, int], Tensor] = {}
        self._rotations: WeakKeyDictionary[Any, dict[Any, Rotation]] = WeakKeyDictionary()
        self._seen: set[str] = set()

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a model without Llama's rotary embedding."""
        kinds = {type(each) for each in model.modules() if inspect.isfunction(vars(type(each)).get("forward"))}
        return self.what if self.has(kinds, ROTARY.removesuffix(".forward")) else ""

    def sample(self, function: Callable[..., Any]) -> list[Any]:
        """Return cosines and sines of frequencies that are known, for two batches of positions and two dtypes."""
        frequencies = torch.linspace(1, 0.1, 4, device="cpu")
        module = SimpleNamespace(inv_freq=frequencies, attention_scaling=1.25, rope_type="default")
        positions = torch.arange(5, device="cpu")[None]
        found: list[Any] = []
        for dtype in (torch.float32, torch.bfloat16):
            for batch in (positions, torch.cat((positions, positions + 3))):
                found += function(module, torch.zeros(len(batch), 5, 8, dtype=dtype, device="cpu"), batch)
        return found

    def _look_through(self, module: ModuleType) -> None:
        super()._look_through(module)
        if module.__name__ in self._seen or getattr(module.__spec__, "_initializing", False):
            return
        self._seen.add(module.__name__)
        for kind in tuple(vars(module).values()):
            if isinstance(kind, type) and kind.__module__ == module.__name__ and _counts(vars(kind).get("forward")):
                self.around(kind, "forward", self._placed)

    def _placed(self, stock: OriginalCall, model: Any, *args: Any, **kwargs: Any) -> Any:
        first: Any = args[0] if args else kwargs.get("input_ids")
        given: Any = first if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        free = len(args) <= 2 and all(kwargs.get(name) is None for name in ("position_ids", *CACHES))
        if free and self.trains(given) and given.dim() > 1:
            kwargs["position_ids"] = self._of_length(given.shape[1], given.device)
        return stock(model, *args, **kwargs)

    def _of_length(self, length: int, device: torch.device) -> Tensor:
        place = (length, *constants.place_of(device))
        return constants.kept(self._positions, place, lambda: torch.arange(length, device=device)[None].clone(), KEPT)

    def _rotation(self, stock: OriginalCall, module: Any, given: Tensor, position_ids: Tensor) -> Any:
        length = position_ids.shape[-1]
        place = (length, *constants.place_of(position_ids.device))
        known = self._positions.get(place) is position_ids and position_ids._version == 0
        # Those two depend on the length that they see; one that does not say its kind may.
        kind = str(getattr(module, "rope_type", "dynamic"))
        fixed = known and "dynamic" not in kind and kind != "longrope"
        if not (fixed and runs(given) and given.device == position_ids.device and torch.is_grad_enabled()):
            return stock(module, given, position_ids)
        kept = self._rotations.setdefault(module, {})
        found = kept.get((given.dtype, place))
        if found is None or not found.holds(module):
            made, frequencies = stock(module, given, position_ids), module.inv_freq
            if len(kept) >= KEPT:
                kept.clear()
            found = Rotation(frequencies, frequencies._version, module.attention_scaling, *made)
            kept[given.dtype, place] = found
        self.acts()
        return found.cos, found.sin


def _counts(forward: Any) -> bool:
    """Return whether a model's `forward` begins to ask for positions where it counts them, as above."""
    if not inspect.isfunction(forward) or "past_seen_tokens" not in inspect.unwrap(forward).__code__.co_varnames:
        return False
    names = [*inspect.signature(forward).parameters]
    # Behind the model and the two arguments that `_placed` lets a caller give by their places.
    if "position_ids" not in names or names.index("position_ids") < 3:
        return False
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))).replace(*CACHES))
    asks = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "position_ids"]
    own = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node) == COUNTED.strip()]
    return len(own) == 1 and min(each.lineno for each in asks) == own[0].lineno


FIXED_POSITIONS = FixedPositions()
