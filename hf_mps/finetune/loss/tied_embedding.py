"""One gradient for a weight that a model uses twice: as its word embedding and as its head.

Autograd makes a gradient of each use and adds them: two tensors of the vocabulary's size stand at once, the head's from
the forward pass on, beside every layer's activations. Here the head hands its gradient to the embedding, whose backward
pass comes last and adds its own rows. Where memory is dearer than time the head's gradient is computed only then, when
the activations are gone, from logits that are computed again (a third more work for the head, none for the layers).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class TiedGradient:
    """The head's gradient on its way to the embedding, in one forward and backward pass.

    The embedding sets `claimed` when it takes the gradient; `gradient()` returns it, (words, width) in float32. With
    `recompute` the head computes it only when the embedding calls that.
    """

    def __init__(self, recompute: bool) -> None:
        self.recompute = recompute
        self.claimed = False
        self.gradient: Callable[[], Tensor] | None = None


class TiedEmbedding(torch.nn.Embedding):
    """A word embedding that claims `shared` where it is set for the pass; otherwise the Embedding that it was."""

    shared: TiedGradient | None = None

    def forward(self, ids: Tensor) -> Tensor:
        shared, self.shared = self.shared, None  # a second use in the same pass gets its own gradient
        if shared is None:
            return super().forward(ids)
        shared.claimed = True
        look_up: Callable[..., Tensor] = _TiedLookup.apply
        return look_up(self.weight, ids, self.padding_idx, shared)


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
        head_gradient, ctx.shared.gradient = ctx.shared.gradient, None
        make_zeros = partial(torch.zeros, shape, dtype=torch.float32, device=upstream.device)
        total = (head_gradient or make_zeros)()
        rows = upstream.flatten(0, -2).float()
        if ctx.padding is not None:  # as in nn.Embedding: the padding row learns nothing
            rows = rows * (ids.flatten() != ctx.padding).unsqueeze(1)
        return total.index_add_(0, ids.flatten(), rows).to(kind), None, None, None
