"""Runs operators that the CPU has for sparse COO tensors and Metal has not: on the CPU, with copies.

PYTORCH_ENABLE_MPS_FALLBACK concerns the dispatch key MPS alone. A sparse tensor on the device has another, SparseMPS,
and what is missing there ends in "Could not run 'aten::addmm_' with arguments from the 'SparseMPS' backend".
"""

from __future__ import annotations

from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from hf_mps.metal.fallback.accounting import OpStats
from hf_mps.metal.fallback.op_schema import OpSchema

KEY = "SparseMPS"


class Kernel:
    """The function to be registered for `op` (an overload of torch.ops) under KEY; each call is booked in `stats`.

    It takes and gives tensors of the device, sparse and dense, as the operator's schema says. Errors are the CPU's own.
    """

    def __init__(self, op: Any, stats: OpStats) -> None:
        self._op = op
        self._stats = stats

    @cached_property
    def _schema(self) -> OpSchema:  # read at the first call, as few programs have one
        return OpSchema.of(self._op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        if self._stats.calls == 0:
            self._stats.announce(args, kwargs)
        with torch._C.DisableTorchFunction():
            copies = Copies()
            result = self._op(*copies.to_cpu(args), **{name: copies.to_cpu(value) for name, value in kwargs.items()})
            given = dict(zip(self._schema.names, args, strict=False)) | kwargs
            for name in self._schema.written:
                copies.write_back(given[name])
            results = result if isinstance(result, tuple) else (result,)
            final = tuple(
                given[written] if written is not None else copies.to_device(value)
                for written, value in zip(self._schema.returns, results, strict=True)
            )
        self._stats.book(start, copies.copied)
        return final if isinstance(result, tuple) else final[0]


class Copies:
    """The CPU's copies of one call's tensors; `copied` counts their bytes."""

    def __init__(self) -> None:
        self.copied = 0
        self._hosts: dict[int, Tensor] = {}

    def to_cpu(self, value: Any) -> Any:
        """The CPU's copy of a device tensor, one for each tensor; anything else passes through."""
        if isinstance(value, Tensor) and value.is_mps:
            if id(value) not in self._hosts:
                self._hosts[id(value)] = value.cpu()
                self.copied += _bytes(value)
            return self._hosts[id(value)]
        return type(value)(self.to_cpu(item) for item in value) if isinstance(value, (list, tuple)) else value

    def to_device(self, value: Any) -> Any:
        """A result on the device."""
        if not isinstance(value, Tensor):
            return value
        self.copied += _bytes(value)
        return value.to("mps")

    def write_back(self, device: Tensor) -> None:
        """Give a device tensor what the operator wrote into its copy: content, and size where that changed."""
        host = self._hosts[id(device)]
        if device.is_sparse:
            device.sparse_resize_and_clear_(host.shape, host.sparse_dim(), host.dense_dim())
        elif device.shape != host.shape:
            device.resize_(host.shape)
        device.copy_(host)
        self.copied += _bytes(host)


def _bytes(tensor: Tensor) -> int:
    return tensor._indices().nbytes + tensor._values().nbytes if tensor.is_sparse else tensor.nbytes
