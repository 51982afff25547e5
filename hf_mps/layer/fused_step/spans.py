"""Tensors as few long ones: those that lie side by side in one storage, and small ones that are brought together.

Plain functions over tensors; nothing is remembered between calls. A tensor stays the object that it was, to hooks,
checkpoints and whoever holds it: only where its elements lie changes. A view of several costs no launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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
        # Each call of untyped_storage makes another object in Python; the storage in C++ is one.
        if each.untyped_storage()._cdata != first.untyped_storage()._cdata or each.storage_offset() != reached:
            return None
        reached += each.shape[dim] * stride[dim]
    shape[dim] = sum(each.shape[dim] for each in tensors)
    return first.as_strided(shape, stride)


def pieces(whole: Tensor, sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Return the parts of `whole` along `dim`, each of the length that `sizes` gives it.

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
    """Return the rows of several parameters as one tensor, in whose memory they lie from now on, or None.

    None where one of them shares its memory with anything else, which would no longer see its changes. Each stays the
    object that it was, and its values what they were.
    """
    found = joined(parameters, 0)
    if found is None and all(_fill([each]) for each in parameters):
        with torch.no_grad():
            found = torch.cat([each.detach() for each in parameters])
            for each, part in zip(parameters, pieces(found, [len(each) for each in parameters], 0), strict=True):
                each.data = part
    return found


SMALL = 2**20
"""Bytes of a tensor up to which it is brought together with others.

A launch takes the host some microseconds, in which a Mac's GPU copies half a megabyte (M1, 68 GB/s) to four (Max):
for a small tensor the launch is the price, for a large one the copy would be.
"""
BUFFER = 2**25
"""Bytes of a buffer: what is gathered is in memory twice by so much at most, as each tensor gives its own back."""


def plain(tensor: Any) -> bool:
    """Whether it is an ordinary dense tensor, whose elements may lie anywhere: no DTensor, sparse or meta tensor."""
    ordinary = type(tensor) is torch.Tensor and tensor.layout == torch.strided and not tensor.is_meta
    return ordinary and not tensor.requires_grad and tensor.numel() > 0


def spans(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same elements in as few tensors: neighbours in a storage become one of one dimension, others stay.

    `tensors` are plain ones. What overlaps, or has gaps, is returned as it is. Storages come in the order of their
    first tensors, and not of their addresses: a sum over all of them is the same in every process, to the last bit.
    """
    runs: list[list[torch.Tensor]] = []
    for several in _by_storage(tensors):
        reached: tuple[int, torch.dtype] | None = None
        for tensor in sorted(several, key=lambda each: int(each.storage_offset())):
            filled, offset = dense(tensor), int(tensor.storage_offset())
            if filled and reached == (offset, tensor.dtype):
                runs[-1].append(tensor)
            else:
                runs.append([tensor])
            reached = (offset + tensor.numel(), tensor.dtype) if filled else None
    return [run[0] if len(run) == 1 else run[0].as_strided((sum(each.numel() for each in run),), (1,)) for run in runs]


def gather(tensors: Sequence[torch.Tensor], small: int = SMALL, buffer: int = BUFFER) -> list[torch.Tensor]:
    """Let small plain tensors lie side by side, and return all as few long ones, as `spans` does.

    Those of a dtype and a device get buffers of their own, of at most `buffer` bytes; `small` is the size in bytes up
    to which a tensor is moved, or several that fill a storage. What shares its storage with anything else stays where
    it is: whoever looks through that has to see what happens to it. Waits for nothing.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[list[torch.Tensor]]] = {}
    rest, found = [], []
    for several in _by_storage(tensors):
        if sum(each.nbytes for each in several) <= small and _fill(several):
            kinds.setdefault((several[0].dtype, several[0].device), []).append(several)
        else:
            rest += several
    for kind in kinds.values():
        for together in _pieces(kind, buffer):
            if len(together) > 1:
                found.append(_brought_together([each for several in together for each in several]))
            else:
                rest += together[0]
    return found + spans(rest)


def _by_storage(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for each in tensors:
        # The address of the C++ storage: a storage without bytes has no place in memory to go by.
        found.setdefault(each.untyped_storage()._cdata, []).append(each)
    return found.values()


def _fill(tensors: list[torch.Tensor]) -> bool:
    """Return whether tensors of one storage fill it side by side in their order, and nothing else looks into it."""
    storage = tensors[0].untyped_storage()
    # One of the users is the object that was made for this question.
    if torch._C._storage_Use_Count(storage._cdata) != len(tensors) + 1:
        return False
    reached = 0
    for each in tensors:
        begins_here = each.storage_offset() * each.element_size() == reached
        if not begins_here or not each.is_contiguous() or each.dtype != tensors[0].dtype:
            return False
        reached += each.nbytes
    return reached == storage.nbytes()


def _pieces(several: list[list[torch.Tensor]], most: int) -> Iterator[list[list[torch.Tensor]]]:
    """Yield the same in lists of at most `most` bytes each, or of one."""
    piece: list[list[torch.Tensor]] = []
    size = 0
    for one in several:
        bytes_of_one = sum(each.nbytes for each in one)
        if piece and size + bytes_of_one > most:
            yield piece
            piece, size = [], 0
        piece.append(one)
        size += bytes_of_one
    yield piece


def _brought_together(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the buffer in which the tensors lie from now on."""
    with torch.no_grad():
        found = torch.cat([each.view(-1) for each in tensors])
        for each, part in zip(tensors, pieces(found, [each.numel() for each in tensors], 0), strict=True):
            each.set_(part.untyped_storage(), int(part.storage_offset()), each.shape, each.stride())
    return found


def dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements fill one piece of memory, in any order of the dimensions."""
    if tensor.is_contiguous():
        return True
    size = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length > 1 and stride != size:
            return False
        size *= length
    return True
