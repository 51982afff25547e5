"""Several hosts with a Metal device each, as far as one process shows: a world of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import TrainingArguments

from tests.layer.guards import loops


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


def weights_on_each_node(folder: Path) -> bool:
    """The second of two hosts that keep checkpoints of their own: whether it has the weights."""
    TrainingArguments(str(folder / "run"), save_on_each_node=True, report_to="none")
    model = loops.bert()
    second_host = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with patch.dict(os.environ, second_host):
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            model.save_pretrained(folder / "checkpoint")
        finally:
            dist.destroy_process_group()
    return (folder / "checkpoint" / "model.safetensors").is_file()
