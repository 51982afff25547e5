"""FSDP2 on mps, one process a host, against one process with the same global batch: a JSON line of rank 0."""

from __future__ import annotations

import copy
import json

import torch
import torch.distributed as dist
from handed import BYTES
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

RANK, SIZE = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
sharded = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).to("mps")
alone = copy.deepcopy(sharded)
for layer in sharded:
    if isinstance(layer, nn.Linear):
        fully_shard(layer)
fully_shard(sharded)
mine, its = (torch.optim.AdamW(model.parameters(), 1e-2) for model in (sharded, alone))
batches = torch.randn(3, 4 * SIZE, 16, generator=torch.Generator().manual_seed(1))
for batch in batches:
    sharded(batch[RANK * 4 : RANK * 4 + 4].to("mps")).pow(2).mean().backward()
    alone(batch.to("mps")).pow(2).mean().backward()
    for model, optimizer in ((sharded, mine), (alone, its)):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
states = [state["exp_avg"] for state in mine.state.values()]
held = sum(state.to_local().numel() for state in states if isinstance(state, DTensor))
whole = get_model_state_dict(sharded, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if RANK == 0:
    far = max((whole[name] - weight.cpu()).abs().max().item() for name, weight in alone.state_dict().items())
    total = sum(weight.numel() for weight in alone.parameters())
    print(json.dumps({"far": far, "held": held, "total": total, "copied": BYTES["copied"]}))
