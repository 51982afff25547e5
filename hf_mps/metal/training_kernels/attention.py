"""Attention in training, a dispatch forward and two backward, whose scores are never in memory.

PyTorch makes it on Metal of fifteen operators where something learns (`_scaled_dot_product_attention_math`,
ATen/native/transformers/attention.cpp): its own Metal kernels for attention know no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.training_kernels import library
from hf_mps.metal.training_kernels.library import TYPES, Source, by_place
from hf_mps.metal.training_kernels.trial import Case, both_ways

SOURCE = Source("attention.metal", needs="random.metal")
WIDTHS = (32, 64, 128)
"""Columns that the kernels' instances have: that of a call is the first one which is large enough."""
THREADS = 128
NUMBERS = 37
"""Integers of a `Call` in the source."""


@dataclass(frozen=True)
class Call:
    """What is no tensor to learn.

    `seen`: bools that broadcast to (batch, heads, queries, keys), True where a query sees a key; None where each sees
    all, or with `causal` those that are not behind it. `draw`: dropout's, as `library.drawn` returns it.
    """

    scale: float
    seen: Tensor | None = None
    causal: bool = False
    dropout: float = 0.0
    draw: tuple[int, int] | None = None

    def hidden(self, query: Tensor, key: Tensor) -> Tensor | None:
        """Return the bools that say what a query sees."""
        if self.causal:
            return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        return self.seen


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the kernels have an instance for these, whose shapes go together."""
    return query.dtype in TYPES and max(query.shape[3], value.shape[3]) <= WIDTHS[-1]


def attention(query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, differentiable as often as that.

    `query` (batch, heads, queries, width), `key` and `value` with as many heads or a divisor of them, all of one dtype;
    the result has a place's heads side by side in memory, and so have the gradients. A query that sees nothing gets 0.
    """
    compute: Callable[..., Tensor] = _Attention.apply
    return compute(query, key, value, call)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Call) -> Tensor:
        query, key, value = (each if each.stride(3) == 1 else each.contiguous() for each in (query, key, value))
        batch, heads, queries, _ = query.shape
        (out,) = by_place((batch, heads, queries, value.shape[3]), like=query)
        sums = torch.empty(batch, heads, queries, dtype=torch.float32, device=query.device)
        _launch("forward", [out, sums, query, key, value], (query, key, value, out), call, queries, batch * heads)
        # The mask too, so that autograd sees where a program has changed it meanwhile.
        ctx.save_for_backward(query, key, value, out, sums, call.seen)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        query, key, value, out, sums, seen = ctx.saved_tensors
        call = replace(ctx.call, seen=seen)
        if torch.is_grad_enabled():
            return *differentiable(query, key, value, call, kept(query, key, call), upstream), None
        upstream = upstream if upstream.stride(3) == 1 else upstream.contiguous()
        of_query, of_key, of_value = found = by_place(query.shape, key.shape, value.shape, like=query)
        passed = torch.empty_like(sums)
        views = (query, key, value, out, of_query, of_key, of_value, upstream)
        given = [upstream, out, sums, query, key, value]
        _launch("queries", [of_query, passed, *given], views, call, query.shape[2], sums.shape[0] * sums.shape[1])
        given = [passed, upstream, sums, query, key, value]
        _launch("keys", [of_key, of_value, *given], views, call, key.shape[2], key.shape[0] * key.shape[1])
        return *found, None


def _launch(name: str, tensors: list[Tensor], views: Sequence[Tensor], call: Call, rows: int, matrices: int) -> None:
    query, key, value, *_ = views
    width = next(width for width in WIDTHS if width >= max(query.shape[3], value.shape[3]))
    # As in the source: rows of a simdgroup, of which a threadgroup has four.
    block = THREADS // 32 * (4 if width == 128 else 8) // (1 if name == "forward" else 2)
    heads, seen = query.shape[1], call.seen
    mask = [0] * 4 if seen is None else seen.expand(query.shape[0], heads, query.shape[2], key.shape[2]).stride()
    strides = [[number for view in each for number in view.stride()[:3]] for each in (views[:4], views[4:])]
    numbers = [
        heads, heads // key.shape[1], query.shape[2], key.shape[2], query.shape[3], value.shape[3],
        int(call.causal), int(seen is not None), library.threshold(call.dropout),
        *strides[0], *mask, *strides[1],
    ]  # fmt: skip
    # The forward pass has no views of gradients, for which the struct has room all the same.
    numbers += [0] * (NUMBERS - len(numbers))
    SOURCE.kernel(f"{name}_{width}", query.dtype)(
        *tensors, tensors[0] if seen is None else seen, call.draw or (0, 0),
        numbers, [call.scale, 1 / (1 - call.dropout)],
        threads=-(-rows // block) * matrices * THREADS, group_size=THREADS, arg_casts={len(tensors) + 2: "int32"},
    )  # fmt: skip


def kept(query: Tensor, key: Tensor, call: Call) -> Tensor | None:
    """Return what dropout keeps, (batch, heads, queries, keys) of bools, as the kernels draw it; None without."""
    if call.draw is None:
        return None
    return library.kept(call.draw, call.dropout, (*query.shape[:3], key.shape[2]), query.device)


def written_out(query: Tensor, key: Tensor, value: Tensor, call: Call, kept: Tensor | None = None) -> Tensor:
    """Return the same by PyTorch's operators, with what dropout kept, if anything."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = query @ key.transpose(-2, -1) * call.scale
    seen = call.hidden(query, key)
    if seen is not None:
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    chances = torch.softmax(scores, -1)
    if seen is not None:
        chances = chances * seen.any(-1, keepdim=True)
    if kept is not None:
        chances = chances * kept / (1 - call.dropout)
    return chances @ value


def differentiable(
    query: Tensor, key: Tensor, value: Tensor, call: Call, kept: Tensor | None, upstream: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients as functions of everything, for gradients of gradients."""
    with torch.autocast(query.device.type, enabled=False):
        out = written_out(query.float(), key.float(), value.float(), call, kept).to(query.dtype)
        return torch.autograd.grad(out, (query, key, value), upstream, create_graph=True, allow_unused=True)


def cases(_: str) -> Iterator[Case]:
    """Yield both ways of a small encoder's attention, a third of whose keys are hidden, and of two decoders'."""
    seen = torch.ones(4, 1, 1, 64, dtype=torch.bool)
    seen[:, :, :, 43:] = False
    encoder = Call(32**-0.5, seen, dropout=0.1, draw=(0x1234_5678_9ABC_DEF0, 2**32 - 1_000))
    decoder = Call(64**-0.5, causal=True)
    for label, sizes, heads, dtype, call in (
        ("4 x 6 x 64 x 32, padding and dropout, float32", (4, 6, 64, 32), 6, torch.float32, encoder),
        ("1 x 4 x 192 x 64, causal, 2 heads of keys, float32", (1, 4, 192, 64), 2, torch.float32, decoder),
        ("1 x 4 x 100 x 80, causal, bfloat16", (1, 4, 100, 80), 4, torch.bfloat16, decoder),
    ):
        draw = torch.Generator().manual_seed(0)
        shapes = (sizes, *((sizes[0], heads, *sizes[2:]),) * 2, sizes)
        yield _case(label, [torch.randn(each, generator=draw).to(dtype) for each in shapes], call)


def _case(label: str, inputs: list[Tensor], call: Call) -> Case:
    dropped = kept(inputs[0], inputs[1], call)

    def ours(*given: Tensor, compute: Callable[..., Tensor] = attention) -> Tensor:
        seen = None if call.seen is None else call.seen.to(given[0].device)
        return compute(*given, replace(call, seen=seen))

    def stock(*given: Tensor) -> Tensor:
        there = None if dropped is None else dropped.to(given[0].device)
        return ours(*given, compute=functools.partial(written_out, kept=there))

    return Case(label, inputs, functools.partial(both_ways, ours), functools.partial(both_ways, stock))
