"""The CPU's side of one collective's tensors: their own memory where it is shared and contiguous, else a copy.

Gloo reads and writes as many elements as a tensor has from its first one on, whatever its strides are
(ProcessGroupGloo.cpp, getDataPointers): a slice of a larger tensor would lose what lies beside it, so it is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_mps.distributed.metal.traffic import COUNTER
from hf_mps.metal.fallback.host_view import NotShared, host_alias


class HostSide:
    """What Gloo gets for the tensors of one call, and what has to be done when it is through."""

    def __init__(self) -> None:
        self._on_host: list[Callable[[], object]] = []
        self._on_device: list[Callable[[], object]] = []

    @property
    def needs_device(self) -> bool:
        """Whether results are copied to the device at the end, which only a thread that may use it can do."""
        return bool(self._on_device)

    def of(self, value: Any, *, read: bool, written: bool) -> Any:
        """The CPU's side of an argument: of a tensor, or of lists of them; anything else passes through.

        What is not `read` is only made as large; what is `written` gets its result by `end`.
        """
        if isinstance(value, Tensor):
            return self._tensor(value, read, written) if value.is_mps else value
        if isinstance(value, list | tuple):
            return [self.of(each, read=read, written=written) for each in value]
        return value

    def end(self) -> None:
        """Bring the results where they belong; once Gloo is through."""
        for bring in (*self._on_host, *self._on_device):
            bring()
        self._on_host.clear()
        self._on_device.clear()

    def _tensor(self, tensor: Tensor, read: bool, written: bool) -> Tensor:
        alias = self._alias(tensor)
        if alias is None:
            host = tensor.cpu() if read or tensor.is_sparse else _empty(tensor)
            host = host if tensor.is_sparse else host.contiguous()
            if written:
                self._on_device.append(lambda: tensor.copy_(host))
        elif alias.is_contiguous():
            return alias
        else:
            host = alias.contiguous() if read else _empty(tensor)
            if written:
                self._on_host.append(lambda: alias.copy_(host))
        COUNTER.copied += nbytes(host) * (read + written)
        return host

    def _alias(self, tensor: Tensor) -> Tensor | None:
        """A CPU tensor over the memory of a device tensor; None where there is no such."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        try:
            return host_alias(tensor)
        except NotShared:
            return None


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def nbytes(tensor: Tensor) -> int:
    """The bytes of a tensor, of a sparse one those of its values."""
    return tensor._values().nbytes if tensor.is_sparse else tensor.nbytes


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of an argument, in their order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in tensors_in(each)] if isinstance(value, list | tuple) else []
