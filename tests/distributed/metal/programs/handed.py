"""Counts the bytes that Gloo is given in this process from its import on, and those that are no tensor's own."""

from __future__ import annotations

from collections import Counter

from torch import Tensor

from hf_mps.distributed.metal.collectives import HostSide
from hf_mps.metal.fallback.host_view import host_alias, nbytes

BYTES: Counter[str] = Counter()
_stock = HostSide._tensor


def _counted(side: HostSide, tensor: Tensor, read: bool, written: bool) -> Tensor:
    host = _stock(side, tensor, read, written)
    BYTES["given"] += nbytes(host)
    if tensor.is_sparse or host.data_ptr() != host_alias(tensor).data_ptr():
        BYTES["copied"] += nbytes(host) * (read + written)
    return host


HostSide._tensor = _counted  # type: ignore[method-assign]
