"""Attention's softmax with its mask, and its gradient with dropout's, a dispatch each, where PyTorch has an MPSGraph.

In float32, as attention's scores are computed (ATen/native/mps/operations/SoftMax.mm).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hf_mps.metal.training_kernels.library import Source, width
from hf_mps.metal.training_kernels.trial import Case

SOURCE = Source("softmax.metal")


def softmax_in_place(scores: Tensor, added: Tensor | None, heads: int) -> Tensor:
    """Return `softmax(scores + added)` over keys, in the memory of `scores`, (batch x heads, queries, keys).

    `scores` is float32 and as `library.ordinary` says; `added` is float32 and broadcasts to (batch, heads, queries,
    keys).
    """
    rows, queries, keys = scores.shape
    strides = (0, 0, 0, 0) if added is None else added.expand(rows // heads, heads, queries, keys).stride()
    threads = width(keys)
    SOURCE.kernel("softmax", scores.dtype)(
        scores, scores if added is None else added, [heads, queries, keys, int(added is not None)], list(strides),
        threads=rows * queries * threads, group_size=threads, arg_casts="int32",
    )  # fmt: skip
    return scores


def gradient_in_place(arriving: Tensor, chances: Tensor, kept: Tensor | None, factor: float) -> Tensor:
    """Return the gradient of the scores, in the memory of `arriving`, the gradient behind dropout; shapes are alike.

    `chances` is the softmax; `kept` has what dropout kept as bools, which it multiplied by `factor`, None without.
    """
    keys = chances.shape[-1]
    threads = width(keys)
    SOURCE.kernel("softmax_backward", chances.dtype)(
        arriving, chances, chances if kept is None else kept, [keys, int(kept is not None)], factor,
        threads=chances.numel() // keys * threads, group_size=threads, arg_casts={3: "int32"},
    )  # fmt: skip
    return arriving


def cases(_: str) -> Iterator[Case]:
    """Yield both ways of a short batch's attention, a third of whose keys are hidden, with dropout."""
    draw = torch.Generator().manual_seed(0)
    batch, heads, places = 4, 6, 64
    hidden = torch.zeros(batch, 1, 1, places)
    hidden[:, :, :, 2 * places // 3 :] = torch.finfo(torch.float32).min
    kept = torch.rand(batch * heads, places, places, generator=draw) > 0.1
    scores, upstream = (torch.randn(batch * heads, places, places, generator=draw) for _ in range(2))

    def ours(scores: Tensor, upstream: Tensor) -> Sequence[Tensor]:
        chances = softmax_in_place(scores.clone(), hidden.to(scores.device), heads)
        return chances, gradient_in_place(upstream.clone(), chances, kept.to(scores.device), 1 / 0.9)

    def stock(scores: Tensor, upstream: Tensor) -> Sequence[Tensor]:
        added = hidden.to(scores).expand(batch, heads, places, places).reshape(scores.shape)
        chances = torch.softmax(scores.clone().add_(added), -1)
        arriving = torch.ops.aten.native_dropout_backward(upstream, kept.to(scores.device), 1 / 0.9)
        return chances, torch._softmax_backward_data(arriving, chances, -1, scores.dtype)

    yield Case(f"{batch} x {heads} x {places} x {places}, float32", [scores, upstream], ours, stock)
