"""A decoder's positions, and the cosines and sines of its rotation, kept from step to step where they are the same."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from hf_mps.core.patching import OriginalCall
from hf_mps.layer.fused_step import constants
from hf_mps.layer.fused_step.autograd_kernels import runs
from hf_mps.layer.fused_step.model_code import ModelCode

ROTARY = "llama.modeling_llama:LlamaRotaryEmbedding.forward"
COUNTED = """
if position_ids is None:
    past_seen_tokens = past_key_values.get_seq_length() if past_key_values is not None else 0
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
        free = len(args) <= 2 and kwargs.get("position_ids") is None and kwargs.get("past_key_values") is None
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
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    asks = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == "position_ids"]
    own = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node) == COUNTED.strip()]
    return len(own) == 1 and min(each.lineno for each in asks) == own[0].lineno


FIXED_POSITIONS = FixedPositions()
