"""fastai: Learner.fit_one_cycle on a table; its DataLoaders choose the device, or take one."""

import sys

import torch
from fastai.callback.progress import ProgressCallback  # noqa: F401  gives a Learner no_bar
from fastai.callback.schedule import SchedExp  # noqa: F401  gives a Learner fit_one_cycle
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner

torch.manual_seed(0)
rows = torch.randn(128, 20, generator=torch.Generator().manual_seed(0))
pairs = list(zip(rows, (rows[:, :3].sum(1) > 0).long(), strict=True))
loaders = DataLoaders(*(DataLoader(pairs, bs=16) for _ in "tv"), device=torch.device(sys.argv[1]))
network = torch.nn.Sequential(
    torch.nn.Linear(20, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 2)
)
learner = Learner(loaders, network, loss_func=torch.nn.CrossEntropyLoss())
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(3, 1e-2)
print("losses", [each.item() for each in learner.recorder.losses])
