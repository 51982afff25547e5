"""Several hosts with a Metal device each, as far as one process shows: a world of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def alone(**asked: Any) -> bool:
    """Whether a gradient is exchanged in a process group on the device, made as `asked`."""
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **asked)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2).to("mps"))
        model(torch.ones(1, 2, device="mps")).sum().backward()
        return model.module.weight.grad is not None
    except RuntimeError:
        return False
    finally:
        dist.destroy_process_group()


def by_default(folder: Path) -> bool:
    """A script that names no backend."""
    return alone()


def by_gloo_s_name(folder: Path) -> bool:
    """A script that names Gloo, as Lightning does."""
    return alone(backend="gloo")
