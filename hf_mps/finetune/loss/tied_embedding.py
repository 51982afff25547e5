"""One gradient for a weight that a model uses twice: as its word embedding and as its head.

Autograd makes a gradient of each use and adds them: two tensors of the vocabulary's size stand at once, the head's from
the forward pass on, beside every layer's activations. Here the head hands its gradient to the embedding, whose backward
pass comes last and adds its rows to it; and where memory is dearer than time it is only then made, when the activations
are gone, from logits that are computed once more (a third more work for the head, none for the layers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class TiedGradient:
    """The head's gradient on its way to the embedding, in one pass forward and backward.

    `joined` says that the embedding takes it; `gradient` gives it, (words, width) in float32, when it is asked for;
    `late` says that it is to be made no sooner.
    """

    def __init__(self, late: bool) -> None:
        self.late = late
        self.joined = False
        self.gradient: Callable[[], Tensor] | None = None


class TiedEmbedding(torch.nn.Embedding):
    """A word embedding that joins `shared` where one is laid there for the pass; otherwise the Embedding it was."""

    shared: TiedGradient | None = None

    def forward(self, ids: Tensor) -> Tensor:
        shared, self.shared = self.shared, None  # a second use in the same pass has a gradient of its own
        if shared is None:
            return super().forward(ids)
        shared.joined = True
        rows: Tensor = _TiedLookup.apply(self.weight, ids, self.padding_idx, shared)  # type: ignore[no-untyped-call]
        return rows


def is_tied(embedding: Any, head: Any) -> bool:
    """Whether `embedding` is a plain word embedding over the weight of `head`, its gradient dense and unscaled."""
    return (
        type(embedding) is torch.nn.Embedding
        and embedding.weight is head.weight
        and embedding.max_norm is None
        and not (embedding.sparse or embedding.scale_grad_by_freq)
    )


class _TiedLookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding: int | None, shared: TiedGradient) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shared, ctx.padding, ctx.like = shared, padding, (weight.shape, weight.dtype)
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        shape, kind = ctx.like
        made, ctx.shared.gradient = ctx.shared.gradient, None
        total = made() if made is not None else torch.zeros(shape, dtype=torch.float32, device=upstream.device)
        rows = upstream.flatten(0, -2).float()
        if ctx.padding is not None:  # as nn.Embedding: the filler learns nothing from where it stands
            rows = rows * (ids.flatten() != ctx.padding).unsqueeze(1)
        return total.index_add_(0, ids.flatten(), rows).to(kind), None, None, None
