"""Attention that trains in the fewest launches: a Metal kernel of ours, or fewer operators than PyTorch takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_mps.core.patching import OriginalCall
from hf_mps.layer.fused_step import constants, spans
from hf_mps.layer.fused_step.autograd_kernels import AutogradKernel
from hf_mps.layer.fused_step.switch import Part
from hf_mps.layer.guards.platform import batches
from hf_mps.metal.device.no_modes import no_modes
from hf_mps.metal.training_kernels import attention, trial
from hf_mps.metal.training_kernels.library import drawn

Hidden = tuple[Tensor, Tensor | None]
"""What is added to the scores, the least float32 where a key is hidden; and False for a query that sees nothing.

The first has the dimensions of the scores; or three, the heads of all rows of the batch, or a one, as the first."""


@dataclass(frozen=True)
class Call:
    """What is no tensor to learn: what was asked for, and what is hidden."""

    asked: attention.Call
    hidden: Hidden | None

    @property
    def root(self) -> float:
        """What queries and keys are multiplied by."""
        return math.sqrt(self.asked.scale)


def hidden(seen: Tensor, heads: int, *, all_see: bool = False) -> Hidden:
    """The same for a mask of bools that is True where a query sees a key; `all_see` where each is known to see one.

    A score so low becomes 0 beside any other. Where all of a row are, the softmax would be even: stock makes zeros
    (`_safe_softmax`), and the second tensor does. What all queries and heads see alike is made once for each head.
    """
    seen = seen[(None,) * (4 - seen.dim())]
    # A mask that was expanded over the queries is the same for each: it is made once.
    if seen.stride(2) == 0:
        seen = seen.narrow(2, 0, 1)
    alive = None if all_see else seen.any(-1, keepdim=True)
    alike = seen.shape[1] == seen.shape[2] == 1
    # The lowest, and as much more where a key is seen: 0. By a tensor, so that bools become float32 in any program.
    lowest = constants.number(LOWEST, torch.float32, seen.device)
    added = torch.add(lowest, seen.expand(-1, heads, -1, -1) if alike else seen, alpha=-LOWEST)
    return added.flatten(0, 1) if alike else added, alive


LOWEST = torch.finfo(torch.float32).min
KERNEL = "attention"


class Attention(torch.autograd.Function):
    """softmax(query · key · scale + hidden) · value of (batch, heads, places, width), in float32, as stock's.

    The tensors that it keeps are fewer than stock's: the scores after the softmax, those after dropout, and dropout's
    mask as bools.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        """(batch, heads, queries, width of value) in the dtype of the query, a place's heads side by side."""
        with torch.autocast(query.device.type, enabled=False):
            queries, keys, values = _prepared(query, key, value, call)
            # The softmax of the scores (batch x heads, queries, keys).
            scores = torch.bmm(queries, keys.transpose(1, 2))
            added = None if call.hidden is None else _added(call.hidden[0], query)
            # Not baddbmm, a launch less: PyTorch compiles a graph of it for each shape, and one of bmm for all.
            if added is not None:
                scores.view(*query.shape[:3], -1).add_(added)
            chances, dropout = torch.softmax(scores, -1), call.asked.dropout
            used, kept = torch.native_dropout(chances, dropout, True) if dropout else (chances, None)
            out = _by_place(torch.bmm(used, values).view(*query.shape[:3], -1), query.dtype, _alive(call))
        dropped = used if dropout else None
        ctx.save_for_backward(query, key, value, queries, keys, values, chances, dropped, kept)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        """Return its gradients; where they have to have gradients themselves, by operators that have."""
        query, key, value, queries, keys, values, chances, dropped, kept = ctx.saved_tensors
        call = ctx.call
        with torch.autocast(upstream.device.type, enabled=False):
            if torch.is_grad_enabled():
                kept = None if kept is None else kept.view(*query.shape[:3], -1)
                return (*attention.differentiable(query, key, value, call.asked, kept, upstream), None)
            arriving = _arriving(upstream, _alive(call))
            of_value = (chances if dropped is None else dropped).transpose(1, 2), arriving
            by_score = torch.bmm(arriving, values.transpose(1, 2))
            if kept is not None:
                by_score = torch.ops.aten.native_dropout_backward(by_score, kept, 1 / (1 - call.asked.dropout))
            by_score = torch._softmax_backward_data(by_score, chances, -1, torch.float32)
            products = ((by_score, keys), (by_score.transpose(1, 2), queries), of_value)
            return (*_gradients(products, (query, key, value), call), None)


def _added(hidden: Tensor, query: Tensor) -> Tensor:
    """Return what is added to the scores with dimensions for batch and heads."""
    return hidden.view(*query.shape[:2], *hidden.shape[1:]) if hidden.dim() == 3 and len(hidden) > 1 else hidden


def _alive(call: Call) -> Tensor | None:
    return None if call.hidden is None else call.hidden[1]


def _alike(query: Tensor, key: Tensor, value: Tensor) -> bool:
    return query.shape == key.shape == value.shape


@functools.cache
@no_modes()
def _factors(root: float, device: torch.device) -> Tensor:
    """Return what queries, keys and values are multiplied by."""
    found = torch.full((3, 1, 1, 1, 1), root, dtype=torch.float32, device=device)
    # Values are multiplied by nothing.
    found[2].fill_(1)
    return found


def _prepared(query: Tensor, key: Tensor, value: Tensor, call: Call) -> tuple[Tensor, ...]:
    """Queries and keys times the root of the scale, as stock has them, and values; each as `_dense` makes it.

    Where one product made the three, one launch does; where keys and queries were rotated together, two.
    """
    if query.dtype == torch.float32 and _alike(query, key, value):
        for several in ((query, key, value), (query, key)):
            whole = spans.joined(several, 1)
            if whole is not None:
                factors = _factors(call.root, query.device) if len(several) == 3 else call.root
                # The parts of (batch, parts x heads, places, width) times their factors, each as `_dense` makes it.
                count = len(several)
                batch, heads, places, width = whole.shape[0], whole.shape[1] // count, *whole.shape[2:]
                there = whole.view(batch, count, heads, places, width).transpose(0, 1)
                dense = torch.empty(there.shape, dtype=torch.float32, device=whole.device)
                found = torch.mul(there, factors, out=dense).flatten(1, 2).unbind()
                return found if len(several) == 3 else (*found, _dense(value))
    return _scaled(query, call), _scaled(key, call), _dense(value)


def _gradients(
    products: Sequence[tuple[Tensor, Tensor]], likes: tuple[Tensor, Tensor, Tensor], call: Call
) -> list[Tensor]:
    """Those of queries, keys and values, each by the product that its scaled form has; of one kind, side by side."""
    query = likes[0]
    if not _alike(*likes) or query.dtype != torch.float32:
        found = [torch.bmm(*pair).view(like.shape) for pair, like in zip(products, likes, strict=True)]
        return [
            _by_place(each, query.dtype, factor)
            for each, factor in zip(found, (call.root, call.root, None), strict=True)
        ]
    batch, heads, places, width = query.shape
    whole = torch.empty(batch, places, 3, heads, width, dtype=torch.float32, device=query.device)
    gradients = [each.transpose(1, 2) for each in whole.unbind(2)]
    # Each product has separate memory: macOS 14 loses one that is written into a slice (guard sliced-products).
    for pair, place, factor in zip(products, gradients, (call.root, call.root, 1), strict=True):
        torch.mul(torch.bmm(*pair).view(query.shape), factor, out=place)
    return gradients


def _scaled(given: Tensor, call: Call) -> Tensor:
    """Queries or keys times the root of the scale, as stock has it; dense (batch x heads, places, width), float32."""
    dense = torch.empty(given.shape, dtype=torch.float32, device=given.device)
    if given.dtype == torch.float32:
        torch.mul(given, call.root, out=dense)
    else:
        dense.copy_(given).mul_(call.root)
    return dense.flatten(0, 1)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32).contiguous().flatten(0, 1)


def _arriving(upstream: Tensor, alive: Tensor | None) -> Tensor:
    """Return a gradient as `_dense` makes it, zero where a query sees nothing."""
    if alive is None:
        return _dense(upstream)
    dense = torch.empty(upstream.shape, dtype=torch.float32, device=upstream.device)
    return torch.mul(upstream, alive, out=dense).flatten(0, 1)


def _by_place(given: Tensor, dtype: torch.dtype, factor: Tensor | float | None) -> Tensor:
    """Return the same times the factor, if any, with a place's heads side by side in memory, as models use them."""
    # What a model's `transpose(1, 2).contiguous()` asks for then, and the gradient of a projection, is a view.
    batch, heads, places, width = given.shape
    whole = torch.empty(batch, places, heads, width, dtype=dtype, device=given.device).transpose(1, 2)
    if factor is None:
        return whole.copy_(given)
    return torch.mul(given, factor, out=whole) if dtype == given.dtype else whole.copy_(given * factor)


LARGEST = 2**31
"""Scores of a call up to which it acts: what has more is limited by memory and arithmetic, not by launches."""
CAUSAL = 8
"""How many causal masks are kept."""
KEPT = 2**22
"""Elements of a causal mask up to which it is kept: 16 MiB."""


class Asked(NamedTuple):
    """The arguments of `scaled_dot_product_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    dropout: float = 0.0
    causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


class ShortAttention(Part):
    """Stands before `scaled_dot_product_attention` where that trains on Metal without its own kernel.

    Stock makes a float mask in each layer, scales queries and keys each, and asks three times which rows are hidden
    whole (`_scaled_dot_product_attention_math`, ATen/native/transformers/attention.cpp). Here a mask is made once for
    the layers that are given it. Masks of floats, which may learn, stay stock's.
    """

    name = "short-attention"
    what = "attention in half as many launches"
    why = "the price of a small launch is the host's"
    patches = {"aten::scaled_dot_product_attention": AutogradKernel("_attended", when="concerns_call")}

    def __init__(self) -> None:
        super().__init__()
        self._masks = WeakTensorKeyDictionary()
        self._causal: dict[tuple[int, int, torch.device, int], Tensor] = {}

    def words(self, model: Any, device_type: str) -> str:
        """Nothing for a model that computes its attention itself."""
        asked = getattr(getattr(model, "config", None), "_attn_implementation", None)
        return self.what if asked == "sdpa" else ""

    def concerns_call(self, *args: Any, **named: Any) -> bool:
        """Whether it trains, on a device that is ours, with as many heads of each and at most a mask of bools."""
        query, key, value, mask, dropout, causal, scale, enable_gqa = Asked(*args, **named)
        tensors = (query, key, value)
        return (
            query.device.type in self.devices
            and torch.is_grad_enabled()
            and any(each.requires_grad for each in tensors)
            and all(each.dim() == 4 and each.numel() > 0 and each.device == query.device for each in tensors)
            and query.dtype == key.dtype == value.dtype
            and query.is_floating_point()
            and query.shape[0] == key.shape[0] == value.shape[0]
            and key.shape[1] == value.shape[1]
            and (query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0))
            and (query.shape[3], key.shape[2]) == (key.shape[3], value.shape[2])
            and query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2] < LARGEST
            and 0 <= dropout < 1
            and (scale is None or scale >= 0)
            and (mask is None or (not causal and _is_ours(mask, query, key)))
        )

    def _attended(self, stock: OriginalCall, *args: Any, **named: Any) -> Tensor:
        query, key, value, mask, dropout, causal, scale, _ = Asked(*args, **named)
        scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
        self.acts()
        # Hooks for what autograd keeps are the program's: checkpointing ends a replay by an error in one.
        if attention.takes(query, key, value) and trial.may_act(KERNEL):
            draw = drawn(math.prod(query.shape[:3]) * key.shape[2]) if dropout else None
            call = attention.Call(scale, mask, causal, dropout, draw)
            return cast(Tensor, stock.foreign(attention.attention, query, key, value, call))
        if query.shape[1] != key.shape[1]:
            key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
        hidden: Hidden | None = None
        if mask is not None:
            hidden = self._of(mask, query.shape[1])
        elif causal:
            hidden = self._of_causal(query.shape[2], key.shape[2], query.device), None
        whole = Call(attention.Call(scale, mask, causal, dropout), hidden)
        return cast(Tensor, stock.foreign(Attention.apply, query, key, value, whole))

    def _of(self, mask: Tensor, heads: int) -> Hidden:
        """What is added to the scores, and which rows see anything; the same for each layer that is given the mask."""
        # Layers are given views of one mask, cut anew each time.
        base = mask if mask._base is None else mask._base
        stream = constants.place_of(mask.device)
        place = (mask.storage_offset(), mask.shape, mask.stride(), mask._version, heads, stream)
        masks: Any = self._masks
        known = masks.setdefault(base, {})
        if place not in known:
            known.clear()
            known[place] = hidden(mask, heads, all_see=_all_see(mask, base))
        found: Hidden = known[place]
        return found

    def _of_causal(self, queries: int, keys: int, device: torch.device) -> Tensor:
        def made() -> Tensor:
            return hidden(torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(), 1)[0][0]

        known = self._causal if queries * keys <= KEPT else {}
        return constants.kept(known, (queries, keys, *constants.place_of(device)), made, CAUSAL)


def _all_see(mask: Tensor, batch: Tensor) -> bool:
    """Return whether a mask is a batch's for all queries, and hides no row whole: its values on the host say so."""
    whole = mask.dim() == 4 and mask.stride(2) == 0 and mask.storage_offset() == batch.storage_offset()
    if not whole or (mask.shape[0], mask.shape[3]) != tuple(batch.shape) or mask.stride(3) != batch.stride(-1):
        return False
    host = batches.BATCH_WAITS.host(batch)
    return host is not None and bool(host.any(-1).all())


def _is_ours(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Return whether a mask is of bools, and of the scores' shape or of ones."""
    whole = (*query.shape[:3], key.shape[2])
    shape = (1,) * (4 - mask.dim()) + tuple(mask.shape)
    fits = len(shape) == 4 and all(size in (1, most) for size, most in zip(shape, whole, strict=True))
    return mask.dtype == torch.bool and mask.device == query.device and fits and type(mask) is Tensor


SHORT_ATTENTION = ShortAttention()
