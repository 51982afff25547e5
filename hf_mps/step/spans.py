"""Gradients as few long tensors: those that lie side by side in one storage, and small ones that are brought together.

Plain functions over tensors; nothing is remembered between calls. A gradient stays the tensor that it was, to hooks,
checkpoints and whoever holds it: only where its elements lie changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

SMALL = 2**18
"""Bytes of a gradient up to which it is brought together with others.

A launch takes the host some microseconds. In that time a Mac's GPU, at 70 to 500 GB/s, copies a quarter to a few
megabytes: for a small gradient the launch is the price, for a large one the copy would be.
"""
ROW = 4096
"""Elements of a row of a norm: of a longer reduction Metal gives each row a threadgroup, and one float32 sum over
millions of elements would lose digits."""


def plain(tensor: Any) -> bool:
    """Whether it is an ordinary dense tensor, whose elements may lie anywhere: no DTensor, sparse or meta tensor."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.requires_grad
        and tensor.numel() > 0
    )


def spans(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same elements in as few tensors: neighbours in a storage become one of one dimension, others stay.

    Raises nothing: what overlaps, or has gaps, is returned as it is.
    """
    found: list[torch.Tensor] = []
    neighbours: list[torch.Tensor] = []
    end = storage = None
    for tensor in sorted(tensors, key=_place):
        place = (tensor.untyped_storage().data_ptr(), tensor.dtype, tensor.device)
        if place != storage or tensor.storage_offset() != end or not _dense(tensor):
            found += _joined(neighbours)
            neighbours = []
        neighbours.append(tensor)
        storage = place if _dense(tensor) else None
        end = tensor.storage_offset() + tensor.numel()
    return found + _joined(neighbours)


def gather(tensors: Iterable[Any], most: int = SMALL) -> None:
    """Let small plain tensors lie side by side, those of a dtype and a device in one new buffer.

    `most` is the size in bytes up to which a tensor is small. A tensor that shares its storage with anything else stays
    where it is: whoever looks through the other one has to see what happens to it. Waits for nothing.
    """
    loose = [each for each in tensors if plain(each) and each.nbytes <= most and _alone(each)]
    loose.sort(key=_kind)
    for _, kind in groupby(loose, key=_kind):
        together = list(kind)
        if len(together) > 1:
            _bring_together(together)


def _bring_together(tensors: list[torch.Tensor]) -> None:
    with torch.no_grad():
        buffer = torch.cat([_flat(each) for each in tensors])
        offset = 0
        for each in tensors:
            each.data = buffer.as_strided(each.shape, each.stride(), offset)
            offset += each.numel()


def _joined(neighbours: list[torch.Tensor]) -> list[torch.Tensor]:
    if len(neighbours) < 2:
        return neighbours
    first = neighbours[0]
    return [first.as_strided((sum(each.numel() for each in neighbours),), (1,), first.storage_offset())]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """All elements of a dense tensor in the order in which they lie."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one piece of memory, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True


def _alone(tensor: torch.Tensor) -> bool:
    """Whether nothing else looks into its storage, and it fills that."""
    storage = tensor.untyped_storage()
    whole = storage.nbytes() == tensor.nbytes and _dense(tensor)
    # Two: the tensor, and the object that was made for this question.
    return whole and torch._C._storage_Use_Count(storage._cdata) == 2


def _place(tensor: torch.Tensor) -> tuple[str, str, int, int]:
    return (*_kind(tensor), tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()))


def _kind(tensor: torch.Tensor) -> tuple[str, str]:
    return str(tensor.device), str(tensor.dtype)
