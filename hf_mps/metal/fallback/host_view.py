"""The CPU's views of one call's tensors: over the device's own memory where that is possible, else copies.

Two traps, which PyTorch's own documentation of the alias names: wait for the device before the CPU touches a buffer,
and again before the device does. An operator that writes into an argument (`out=`, in-place) must find its result
in the caller's tensor, resized where the operator resizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.operators.calls import ON_METAL

# Below this many bytes a copy is cheaper than setting up an alias: scripts/bench/bench_fallback.py.
SMALL = 32 * 1024

_CPU = torch.device("cpu")


class NotShared(RuntimeError):
    """A buffer that the CPU cannot reach, or an alias that would have to grow: the call goes the copying way."""


class HostView:
    """The CPU's side of one call: `to_host` and its kin give it, `write_back` and `to_device` take everything back.

    `shared` says whether any tensor went without a copy, `copied` how many bytes moved.
    """

    def __init__(self, small: float = float("inf"), overlapping: frozenset[int] = frozenset()) -> None:
        self._small = small  # larger tensors, in bytes, go without a copy
        self.share = small != float("inf")
        self._overlapping = overlapping  # buffers that must keep one stand-in: see `overlapping_storages`
        self.shared = False
        self.copied = 0
        self.became_float32 = False  # a float64 result became float32
        self._stand_ins: dict[int, torch.UntypedStorage] = {}
        self._sparse: dict[int, Tensor] = {}
        self._written: list[tuple[Tensor, Tensor, int]] = []

    def to_host(self, value: Any) -> Any:
        """Return the CPU's side of an argument that is only read; anything but device tensors passes through."""
        if isinstance(value, Tensor):
            if value.is_mps:
                return self._shared(value) if nbytes(value) > self._small else self._copy(value)
            return value
        if isinstance(value, (list, tuple)):
            return [self.to_host(item) for item in value]
        if isinstance(value, torch.device):
            return _CPU if value.type == "mps" else value
        return value

    def to_host_mutable(self, value: Any, *, written: bool) -> Any:
        """The CPU's side of an argument of a call that writes into one: tensors over one buffer stay over one buffer.

        The operator's own checks for overlapping memory then see what they would see on the device.
        """
        if isinstance(value, (list, tuple)):
            return [self.to_host_mutable(item, written=written) for item in value]
        if not isinstance(value, Tensor) or not value.is_mps:
            return self.to_host(value)
        host = self._over(value)
        if written:
            self._written.append((value, host, 0 if value.is_sparse else host.data_ptr()))
        return host

    def alias_output(self, device: Tensor) -> Tensor:
        """Return the CPU's side of a result that is in device memory already. Raises NotShared."""
        host = host_alias(device)
        self.shared = True
        self._written.append((device, host, host.data_ptr()))
        return host

    def write_back(self) -> None:
        """Give the caller's tensors what the operator wrote: content, and size and strides where it resized."""
        for device, host, address in self._written:
            resized = device.shape != host.shape
            if device.is_sparse:
                device.sparse_resize_and_clear_(host.shape, host.sparse_dim(), host.dense_dim())
            elif resized:
                device.resize_(host.shape)
                if device.stride() != host.stride() and torch.ops.aten.is_non_overlapping_and_dense(host):
                    device.as_strided_(host.shape, host.stride())
            # An alias that the operator left in place was written where it belongs.
            if resized or not self.share or host.data_ptr() != address:
                device.copy_(host)
                self.copied += nbytes(host)

    def to_device(self, result: Any) -> Any:
        """Move a fresh CPU result to the device; float64 becomes float32 there."""
        if isinstance(result, Tensor):
            if not result.is_cpu:
                return result
            narrower = ON_METAL.get(result.dtype)
            if narrower is not None:
                self.became_float32 = True
                result = result.to(narrower)
            self.copied += nbytes(result)
            return result.to("mps")
        if isinstance(result, (list, tuple)):
            return type(result)(self.to_device(item) for item in result)
        return result

    def _copy(self, tensor: Tensor) -> Tensor:
        self.copied += nbytes(tensor)
        return tensor.cpu()

    def _shared(self, tensor: Tensor) -> Tensor:
        if tensor.is_conj() or tensor.is_neg():  # bits of the tensor, not of its memory
            return self._copy(tensor)
        try:
            alias = host_alias(tensor)
        except NotShared:
            return self._copy(tensor)
        self.shared = True
        return alias

    def _over(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor of the same size and strides over the stand-in for the tensor's buffer."""
        if tensor.is_sparse:
            if id(tensor) not in self._sparse:  # what is read and written is one tensor there too
                self._sparse[id(tensor)] = self._copy(tensor)
            return self._sparse[id(tensor)]
        if tensor.numel() == 0:  # may have to grow, which an alias cannot
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_CPU)
        # `_cdata` is the address of the C++ storage, one for all tensors that share it.
        storage = tensor.untyped_storage()
        if not self.share and storage._cdata not in self._overlapping:
            return self._copy(tensor)
        stand_in = self._stand_ins.get(storage._cdata)
        if stand_in is None:
            stand_in = self._stand_ins[storage._cdata] = self._stand_in(storage)
        host = _view(stand_in, tensor)
        if tensor.is_conj():
            host = torch._conj(host)
        return torch._neg_view(host) if tensor.is_neg() else host

    def _stand_in(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if self.share:
            self.shared = True
            return _alias(storage)
        self.copied += storage.nbytes()
        whole = torch.empty(0, dtype=torch.uint8, device="mps").set_(storage)
        copy: Tensor = whole.cpu()
        return copy.untyped_storage()


def overlapping_storages(tensors: list[Tensor], written: list[Tensor]) -> frozenset[int]:
    """Return the buffers, by address, that two of a call's tensors share, or in which a written one overlaps itself.

    The operator checks such cases by address, so they cannot be copied tensor by tensor.
    """
    seen: set[int] = set()
    overlapping: set[int] = set()
    tensors, written = ([each for each in some if not each.is_sparse] for some in (tensors, written))
    for tensor in tensors:
        key = tensor.untyped_storage()._cdata
        (overlapping if key in seen else seen).add(key)
    for tensor in written:
        if 0 in tensor.stride() and tensor.numel() > 1:
            overlapping.add(tensor.untyped_storage()._cdata)
    return frozenset(overlapping)


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, of a sparse one those of its indices and values."""
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


def host_alias(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of a device tensor; the caller synchronises before and after.

    Raises NotShared where the tensor's buffer is private to the device.
    """
    return _view(_alias(tensor.untyped_storage()), tensor)


def _alias(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    if storage.nbytes() == 0:
        return torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
    try:
        alias: torch.UntypedStorage = torch.mps._host_alias_storage(storage)
    except RuntimeError as error:
        raise NotShared(str(error)) from error
    return alias


def _view(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=_CPU)
    view: Tensor = empty.set_(storage, like.storage_offset(), like.shape, like.stride())
    return view
