"""DistributedDataParallel on mps, one process a host, against one process with the same global batch: a JSON line."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from handed import BYTES
from torch import Tensor, nn
from torch._C._distributed_c10d import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from hf_mps.distributed.metal import works

ROWS, STEPS = 4, 3

RANK, SIZE = dist.get_rank(), dist.get_world_size()
BATCHES = torch.randn(STEPS, ROWS * SIZE, 8, generator=torch.Generator().manual_seed(3))


def network() -> nn.Module:
    torch.manual_seed(1)
    layers = (nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
    return nn.Sequential(*layers).to("mps")


def mine(batch: Tensor) -> Tensor:
    return batch[RANK * ROWS : (RANK + 1) * ROWS].to("mps")


def trained(model: nn.Module, batches: list[Tensor], *, hold: bool = False) -> list[Tensor]:
    """The weights after a step for each batch; with `hold` one step for all, whose gradients only add up before."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number, batch in enumerate(batches):
        if hold and number < len(batches) - 1:
            with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
                model(batch).pow(2).mean().backward()
            continue
        model(batch).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().cpu() for weight in model.parameters()]


def furthest(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(found, wanted, strict=True))


def ways() -> dict[str, float]:
    """For each way of DDP's how far its weights are from those of one process."""
    alone = trained(network(), [batch.to("mps") for batch in BATCHES])
    held = trained(network(), [batch.to("mps") for batch in BATCHES], hold=True)
    parts = [mine(batch) for batch in BATCHES]
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "device_ids": {"device_ids": [0]},
        "views": {"gradient_as_bucket_view": True},
        "buckets": {"bucket_cap_mb": 0.001},
        "static": {"static_graph": True},
        "unused": {"find_unused_parameters": True},
    }
    found = {
        name: furthest(trained(DistributedDataParallel(network(), **kind), parts), alone)
        for name, kind in kinds.items()
    }
    found["no_sync"] = furthest(trained(DistributedDataParallel(network()), parts, hold=True), held)
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook, default_hooks.allreduce_hook):
        model = DistributedDataParallel(network())
        model.register_comm_hook(None, hook)
        found[hook.__name__] = furthest(trained(model, parts), alone)
    builtin = DistributedDataParallel(network())
    builtin._register_builtin_comm_hook(BuiltinCommHookType.FP16_COMPRESS)  # type: ignore[no-untyped-call]
    found["builtin fp16"] = furthest(trained(builtin, parts), alone)
    power = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=8, start_powerSGD_iter=2)
    power.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    found["powerSGD"] = furthest(trained(power, parts), alone)
    return found


def copied() -> dict[str, int]:
    """What a step of DDP moves and copies."""
    model = DistributedDataParallel(network())
    parts = [mine(batch) for batch in BATCHES]
    trained(model, parts[:1])
    BYTES.clear()
    trained(model, parts)
    payload = BYTES["given"] // STEPS
    return {"payload": payload, "copied": BYTES["copied"], "gradients": sum(w.nbytes for w in model.parameters())}


def buffers() -> bool:
    """Whether every rank has rank 0's running mean of a batch norm in a forward pass."""
    model = DistributedDataParallel(nn.BatchNorm1d(8).to("mps"))
    model(mine(BATCHES[0]) + RANK)
    of_main = model.module.running_mean.clone()
    dist.broadcast(of_main, 0)
    model.eval()  # uses the running mean and leaves it
    model(mine(BATCHES[0]))
    same = torch.tensor([torch.equal(of_main, model.module.running_mean)], device="mps")
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def joined() -> int:
    """How many batches were seen where rank r has r + 1 of them."""
    model = DistributedDataParallel(network())
    seen = torch.zeros(1, device="mps")
    with Join([model]):
        for _ in range(RANK + 1):
            model(mine(BATCHES[0])).sum().backward()
            seen += 1
    dist.all_reduce(seen)
    return int(seen)


def gone() -> dict[str, str]:
    """What the others hear when the last rank goes away: of a call that waits, and of one that does not."""
    said: dict[str, str] = {}
    tensor = torch.ones(4, device="mps")
    if RANK == SIZE - 1:
        sys.stdout.flush()
        dist.all_reduce(tensor)
        os._exit(0)
    dist.all_reduce(tensor)
    for way in ("waits", "work", "future"):
        try:
            work = dist.all_reduce(tensor, async_op=way != "waits")
            if way == "work":
                work.wait()
            if way == "future":
                work.get_future().wait()
        except RuntimeError as error:
            said[way] = str(error).splitlines()[0]
    return said


def main() -> None:
    result = {"ways": ways(), "step": copied(), "buffers": buffers(), "joined": joined(), "kept": len(works._alive)}
    if RANK == 0:
        print(json.dumps(result), flush=True)
    said = gone()
    if RANK == 0:
        print(json.dumps(said), flush=True)


main()
