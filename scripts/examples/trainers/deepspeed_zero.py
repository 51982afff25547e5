"""DeepSpeed: ZeRO-1 on one process, with its own accelerator for mps (DS_ACCELERATOR)."""

import os
import sys

os.environ |= {"DS_ACCELERATOR": sys.argv[1], "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
import deepspeed
import torch

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
settings = {
    "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}
engine, *_ = deepspeed.initialize(model=network, model_parameters=network.parameters(), config=settings)
rows, losses = torch.randn(16, 20, generator=torch.Generator().manual_seed(0)), []
labels = (rows.sum(1) > 0).long()
for _ in range(12):
    loss = torch.nn.functional.cross_entropy(engine(rows.to(engine.device)), labels.to(engine.device))
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
print("losses", losses)
