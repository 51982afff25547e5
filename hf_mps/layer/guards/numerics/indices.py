"""Guards of what looks up or adds by an index.

index-add-gaps: sums by index_add_ reach transposed tensors and slices on macOS 14.
embedding-grad: the gradient of a huge embedding is computed in parts.
huge-embedding: a parameter of 2^31 elements or more is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_mps.core.errors import UserError
from hf_mps.core.patching import OriginalCall
from hf_mps.layer.guards import training_hooks
from hf_mps.layer.guards.base import Guard
from hf_mps.layer.guards.kernel_overrides import Kernel, Tried


def _lost(given: Any, *_: Any, **__: Any) -> bool:
    return not given.is_contiguous() or given.storage_offset() != 0


def _right() -> bool:
    """Return whether it adds to a transposed tensor."""
    sums, index = torch.zeros(2, 3, device="mps").t(), torch.zeros(1, dtype=torch.long, device="mps")
    sums.index_add_(0, index, torch.ones(1, 2, device="mps"))
    return int(sums.sum().cpu()) == 2


class IndexAddGaps(Tried):
    """Adds to a contiguous copy, which is then copied back, below autograd.

    Before macOS 15 MPSGraph's result goes to a temporary buffer where the tensor that it is for has gaps or an offset,
    and nothing copies it back.
    """

    name = "index-add-gaps"
    what = "index_add_ leaves transposed tensors and slices as they were on macOS 14, without an error"

    given, trials = "transposed tensors", {"index_add_": _right}
    says = "index_add_ adds to copies of tensors with gaps or an offset, which are copied back"
    patches = {"aten::index_add_": Kernel("_copied_back", when=_lost, says=says, faults=("index-add-gaps",))}

    def _copied_back(self, stock: OriginalCall, given: Any, *args: Any, **named: Any) -> Any:
        return given.copy_(stock.partial(given.clone(memory_format=torch.contiguous_format), *args, **named))


GRAD_LIMIT = 2**31 - 1
"""Elements of the weight, and of the gradients that come in, that Metal's kernel takes (Embedding.mm)."""


def _huge(grad: Any, indices: Any, rows: int, *_: Any) -> bool:
    return bool(max(rows, indices.numel()) * grad.shape[-1] > GRAD_LIMIT)


class EmbeddingGrad(Guard):
    """Stands before the backward pass of embeddings, below autograd; `huge-embedding` refuses such weights before 2.14.

    It runs once a step for each embedding.
    """

    name = "embedding-grad"
    what = "the backward pass of an embedding of 2^31 or more elements ends in an error, after the forward pass"
    until = "PyTorch's kernel takes larger tensors and the oldest supported torch has it"
    untried = "a trial would take 8 GB"

    says = f"an embedding's gradient of more than {GRAD_LIMIT:,} elements is computed in parts"
    patches = {"aten::embedding_dense_backward": Kernel("_in_parts", when=_huge, says=says)}

    def _in_parts(self, stock: OriginalCall, *args: Any) -> Any:
        return stock.foreign(_gradient, stock.function, *args)


def _gradient(whole: Callable[..., Any], grad: Any, indices: Any, rows: int, padding: int, scaled: bool) -> Any:
    """Return the gradient of a weight of `rows` rows, by rows where the weight is too large, else by columns.

    Each row is the same sum as in one pass, and is counted (`scaled`) in one part alone.
    """
    width = grad.shape[-1]
    if rows * width <= GRAD_LIMIT:
        most = max(1, GRAD_LIMIT // max(1, indices.numel()))
        strips = [grad[..., start : start + most] for start in range(0, width, most)]
        found = [whole(strip, indices, rows, padding, scaled) for strip in strips]
        return found[0] if len(found) == 1 else torch.cat(found, -1)
    total = grad.new_empty(rows, width)
    most = max(1, GRAD_LIMIT // width - 1)
    for start in range(0, rows, most):
        count = min(most, rows - start)
        here = (indices >= start) & (indices < start + count) & (indices != padding)
        local = torch.where(here, indices - start, count)  # all others go to one row more, which is padding
        part = _gradient(whole, grad, local, count + 1, count, scaled)
        total[start : start + count].copy_(part[:count])
    return total


HUGE_LIMIT = 2**31
"""Elements; kernels that index with 32 bits read other rows beyond (pytorch#188756)."""


class HugeEmbedding(Guard):
    """Looks at the sizes of the parameters when their optimizer is made, or their model moved; frozen ones are read."""

    name = "huge-embedding"
    what = "looking up rows in a tensor of 2^31 or more elements gives zeros"
    untried = "a trial would take 8 GB"
    patches = training_hooks.parameters("_look", frozen=True, lightning=True)

    def _look(self, parameters: list[Any]) -> None:
        huge = next((parameter for parameter in parameters if parameter.numel() >= HUGE_LIMIT), None)
        if huge is not None and self.needed:
            self.acted(f"a parameter of shape {list(huge.shape)} was refused", aloud=False)
            raise UserError(
                f"a parameter of shape {list(huge.shape)} has {huge.numel():,} elements; on Metal torch before 2.14 "
                f"reads zeros beyond 2^31 (pytorch#188756); next: pip install 'torch>=2.14', or HF_MPS_DEVICE=cpu"
            )
