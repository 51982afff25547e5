"""The link between the ranks of a running process group, as its own all-reduce finds it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import distributed

from hf_mps.distributed.link.cost import Link, traffic

SMALL, LARGE = 4, 4 * 2**20
"""Bytes: one element, for the latency, and a sixth of a bucket of gradients, for the bandwidth."""
TRIALS = 5


def measure(device: torch.device) -> Link:
    """Return the link that all ranks find together, called by all of them; takes some milliseconds on Gigabit Ethernet.

    Latency and bandwidth are those with which `Link.all_reduce` says the times that were measured: what the backend
    copies and waits for beside the wire is in them. Every rank returns the same.
    """
    ranks = distributed.get_world_size()
    least = torch.tensor([_reduce(SMALL, device), _reduce(LARGE, device)], device=device)
    distributed.all_reduce(least, distributed.ReduceOp.MAX)
    small, large = (float(each) for each in least.cpu())
    latency = small / (2 * (ranks - 1))
    return Link(8 * traffic(LARGE, ranks) / max(large - small, 1e-9), latency)


def _reduce(size: int, device: torch.device) -> float:
    """Return the least seconds that an all-reduce of `size` bytes takes here."""
    tensor, together = torch.zeros(size // 4, device=device), torch.zeros(1, device=device)
    took = []
    for _ in range(TRIALS):
        distributed.all_reduce(together)  # `barrier` would take the machine's accelerator, whatever `device` is
        _finish(device)
        began = time.perf_counter()
        distributed.all_reduce(tensor)
        _finish(device)
        took.append(time.perf_counter() - began)
    return min(took)


def _finish(device: torch.device) -> None:
    """Wait until the device has done what it was sent."""
    backend: Any = {"cuda": torch.cuda, "mps": torch.mps}.get(device.type)
    if backend is not None:
        backend.synchronize()
