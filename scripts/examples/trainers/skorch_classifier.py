"""skorch: NeuralNetClassifier.fit on a table, its device named as skorch's documentation does."""

import sys

import numpy
import torch
from skorch import NeuralNetClassifier

torch.manual_seed(0)
rows = numpy.random.default_rng(0).normal(size=(256, 20)).astype("float32")
labels = (rows[:, :3].sum(1) > 0).astype("int64")
network = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
trained = NeuralNetClassifier(
    network, criterion=torch.nn.CrossEntropyLoss, max_epochs=6, lr=0.1, device=sys.argv[1], verbose=0
)
trained.fit(rows, labels)
print("losses", [float(each) for each in trained.history[:, "train_loss"]])
