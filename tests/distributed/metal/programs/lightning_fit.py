"""A script as people write them: Lightning's Trainer with DDP where there are several hosts."""

import json
import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn

hosts = int(os.environ.get("WORLD_SIZE", "1"))


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


pl.seed_everything(0)
x = torch.randn(32, 8)
data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
# In the rows' order, as one process takes them; Lightning's own sampler for several would shuffle.
rank = int(os.environ.get("RANK", "0"))
sampler = torch.utils.data.DistributedSampler(data, hosts, rank, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=16 // hosts, sampler=sampler)
asked = {"strategy": "ddp"} if hosts > 1 else {}
trainer = pl.Trainer(
    num_nodes=hosts,
    use_distributed_sampler=False,
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=sys.argv[1],
    **asked,
)
module = Module()
trainer.fit(module, loader)
if trainer.is_global_zero:
    strategy = type(trainer.strategy).__name__
    print(
        json.dumps(
            {"strategy": strategy, "device": trainer.strategy.root_device.type, "weights": module.layer.weight.tolist()}
        )
    )
