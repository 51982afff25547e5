"""Tensors that lie side by side in one storage, seen as the one tensor that they are: a view costs no launch.

Whoever hands several tensors on lets them lie so, and whoever is handed several asks whether they do. Where they do
not, each is what it was: nothing but the number of launches rests on where a tensor lies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def joined(tensors: Sequence[Tensor], dim: int) -> Tensor | None:
    """The tensor of which these are the pieces along `dim`, in their order, or None. Knows nothing of gradients."""
    first = tensors[0].detach()
    shape, stride = list(first.shape), first.stride()
    reached = first.storage_offset()
    for each in tensors:
        alike = each.dtype == first.dtype and each.device == first.device and each.stride() == stride
        rest = [size for place, size in enumerate(each.shape) if place != dim % len(shape)]
        if not alike or rest != [size for place, size in enumerate(shape) if place != dim % len(shape)]:
            return None
        if each.untyped_storage()._cdata != first.untyped_storage()._cdata or each.storage_offset() != reached:
            return None
        reached += each.shape[dim] * stride[dim]
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return first.as_strided(shape, stride)


def pieces(whole: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """The parts of `whole` along `dim`, each of the length that `sizes` gives it.

    They are no views of it: each counts its changes by itself, as tensors do that were made one after the other.
    """
    found, start = [], 0
    for size in sizes:
        part = whole.narrow(dim, start, size)
        empty = torch.empty(0, dtype=whole.dtype, device=whole.device)
        found.append(empty.set_(whole.untyped_storage(), int(part.storage_offset()), part.shape, part.stride()))
        start += size
    return found


def brought_together(parameters: Sequence[Tensor]) -> Tensor | None:
    """The rows of several parameters as one tensor, in whose memory they lie from now on, or None.

    None where one of them shares its memory with anything else, which would no longer see its changes. Each stays the
    object that it was, and its values what they were.
    """
    found = joined(parameters, 0)
    if found is None and all(map(alone, parameters)):
        with torch.no_grad():
            found = torch.cat([each.detach() for each in parameters])
            for each, part in zip(parameters, pieces(found, [len(each) for each in parameters], 0), strict=True):
                each.data = part
    return found


def alone(tensor: Tensor) -> bool:
    """Whether nothing else looks into its storage, and it fills that in order."""
    storage = tensor.untyped_storage()
    # Two: the tensor, and the object that was made for this question.
    single = torch._C._storage_Use_Count(storage._cdata) == 2
    return single and storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
