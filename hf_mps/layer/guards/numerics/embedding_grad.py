"""embedding-grad: the gradient of an embedding of 2^31 elements or more is computed in parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_mps.core.original_call import OriginalCall
from hf_mps.core.patching import Patch
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel

LIMIT = 2**31 - 1
"""Elements of the weight, and of the gradients that come in, that Metal's kernel takes (Embedding.mm)."""


class EmbeddingGrad(Guard):
    """Stands before the backward pass of embeddings, below autograd; `huge-embedding` refuses such weights before 2.14.

    It runs once a step for each embedding.
    """

    name = "embedding-grad"
    what = "the backward pass of an embedding of 2^31 or more elements ends in an error, after the forward pass"
    until = "PyTorch's kernel takes larger tensors and the oldest supported torch has it"
    untried = "a trial would take 8 GB"

    @property
    def patches(self) -> dict[str, str | Patch]:
        """Its kernel before the device's."""
        return {"aten::embedding_dense_backward": Kernel("_in_parts", when=_huge)}

    def _in_parts(self, stock: OriginalCall, *args: Any) -> Any:
        if not self.needed:
            return stock(*args)
        self.acted(f"an embedding's gradient of more than {LIMIT:,} elements is computed in parts", aloud=False)
        return stock.foreign(_gradient, stock.function, *args)


def _huge(grad: Any, indices: Any, rows: int, *_: Any) -> bool:
    width = grad.shape[-1]
    return bool(rows * width > LIMIT or indices.numel() * width > LIMIT)


def _gradient(whole: Callable[..., Any], grad: Any, indices: Any, rows: int, padding: int, scaled: bool) -> Any:
    """The gradient of a weight of `rows` rows, by rows where the weight is too large, else by columns.

    Each row is the same sum as in one pass, and is counted (`scaled`) in one part alone.
    """
    import torch

    width = grad.shape[-1]
    if rows * width <= LIMIT:
        most = max(1, LIMIT // max(1, indices.numel()))
        strips = [grad[..., start : start + most] for start in range(0, width, most)]
        found = [whole(strip, indices, rows, padding, scaled) for strip in strips]
        return found[0] if len(found) == 1 else torch.cat(found, -1)
    total = grad.new_empty(rows, width)
    most = max(1, LIMIT // width - 1)
    for start in range(0, rows, most):
        count = min(most, rows - start)
        here = (indices >= start) & (indices < start + count) & (indices != padding)
        local = torch.where(here, indices - start, count)  # all others go to one row more, which is padding
        part = _gradient(whole, grad, local, count + 1, count, scaled)
        total[start : start + count].copy_(part[:count])
    return total


GUARD = EmbeddingGrad()
