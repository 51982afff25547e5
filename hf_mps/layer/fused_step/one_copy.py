"""A batch goes to the device as one piece of memory: one copy in place of one for each of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from hf_mps.layer.fused_step.base import Part
from hf_mps.layer.guards.platform import batch_waits
from hf_mps.metal.device import machine

ALIGNED = 256
"""Bytes at whose multiples the tensors begin: the offset of a texture or a constant in a buffer on any GPU of Apple's
(Metal Feature Set Tables), so that of every kernel's argument."""
READS_OFFSETS = 15
"""The macOS from which on PyTorch hands a graph a tensor that begins within a buffer; before, it copies it first
(`needsGather`, ATen/native/mps/OperationUtils.h)."""


class OneCopy(Part):
    """Works within the guard batch-waits, which says when a batch is moved, and keeps the values on the host.

    Each tensor has its dtype, shape and strides, and a version of its own; what stock does not have is that they share
    a storage, which lives as long as the last of them.
    """

    name = "one-copy"
    what = "each batch in one copy"
    why = "the price of a small copy is the host's"

    def pays(self, device_type: str) -> str:
        """Where the guard is on, and this macOS reads a tensor from the middle of a buffer."""
        macos = machine.present().macos
        reads = macos is None or int(macos.partition(".")[0]) >= READS_OFFSETS
        return self.why if device_type == "mps" and reads and batch_waits.GUARD.on else ""

    def install(self, module: ModuleType) -> None:
        """Offer itself to the guard."""
        super().install(module)
        batch_waits.GUARD.together = self._together

    def _together(self, batch: Any) -> batch_waits.Moved:
        if "mps" not in self.devices or self.broken:
            return {}
        try:
            moved = together([each for each in tensors(batch) if batch_waits.movable(each)], torch.device("mps"))
            if moved:
                self.acts()
            return moved
        except Exception as error:
            self.failed(error)
            return {}


def tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, through mappings, lists and tuples; each object once."""
    found: dict[int, Tensor] = {}
    waiting = [batch]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found.setdefault(id(value), value)
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple):
            waiting.extend(value)
    return iter(found.values())


def together(sources: list[Tensor], device: torch.device) -> batch_waits.Moved:
    """Copy tensors of the host to the device in one piece, without a wait.

    Returns for each source's id its tensor on the device, and its values on the host in memory of their own. Left out
    are those with gaps or of one element twice, all of them where fewer than two are left, and what would make more
    than `batch_waits.LARGEST` bytes.
    """
    places: list[tuple[Tensor, int]] = []
    size = 0
    for source in sources:
        # A copy keeps the strides of what fills its memory.
        dense = torch.empty_like(source, device="meta").stride() == source.stride()
        if dense and size + source.nbytes <= batch_waits.LARGEST:
            places.append((source, size))
            size += -(-source.nbytes // ALIGNED) * ALIGNED
    if len(places) < 2:
        return {}
    host = torch.empty(size, dtype=torch.uint8)
    here = {id(source): _at(host, source, start) for source, start in places}
    for source, _ in places:
        here[id(source)].copy_(source)
    # The method itself: what is put around Tensor.to looks at single tensors.
    there = torch._C.TensorBase.to(host, device, non_blocking=True)
    return {id(source): (_at(there, source, start), here[id(source)]) for source, start in places}


def _at(buffer: Tensor, like: Tensor, start: int) -> Tensor:
    """A tensor as `like` that begins `start` bytes into the buffer. No view: it counts its changes by itself."""
    empty = torch.empty(0, dtype=like.dtype, device=buffer.device)
    return empty.set_(buffer.untyped_storage(), start // like.element_size(), like.shape, like.stride())


PART = OneCopy()
