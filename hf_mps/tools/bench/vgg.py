"""VGG16 from its paper: configuration D of Simonyan and Zisserman, "Very Deep Convolutional Networks", 2014.

https://arxiv.org/abs/1409.1556, table 1 and section 2.1: 3 x 3 convolutions with stride 1 and padding 1, each with a
ReLU; 2 x 2 max-pooling with stride 2 behind each group; three fully connected layers. Dropout of 0.5 behind the first
two of them is section 3.1's. torchvision has the same network, and cannot be imported beside PyTorch's CPU wheel.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn

GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions, group by group."""
HIDDEN, CLASSES = 4096, 1000


class VGG16(nn.Module):
    """Thirteen convolutions and three fully connected layers; 138,357,544 parameters at the paper's 224 pixels.

    It takes (N, 3, `side`, `side`) and returns logits (N, 1000). `side` is a multiple of 32, which the five poolings
    divide by; with less than the paper's 224 the first fully connected layer is smaller. Raises ValueError for others.
    """

    def __init__(self, side: int = 224) -> None:
        super().__init__()
        shrunk, rest = divmod(side, 2 ** len(GROUPS))
        if rest or not shrunk:
            raise ValueError(f"VGG16 takes pictures whose side is a multiple of {2 ** len(GROUPS)} pixels, not {side}")
        self.features = nn.Sequential(*_convolutions())
        sizes = (GROUPS[-1][-1] * shrunk**2, HIDDEN, HIDDEN)
        layers: list[nn.Module] = []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(0.5)]
        self.classifier = nn.Sequential(nn.Flatten(), *layers, nn.Linear(HIDDEN, CLASSES))
        self.apply(_start)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Logits (N, 1000) of pictures (N, 3, side, side)."""
        logits: torch.Tensor = self.classifier(self.features(pictures))
        return logits


def _convolutions() -> list[nn.Module]:
    layers: list[nn.Module] = []
    before = 3
    for group in GROUPS:
        for channels in group:
            layers += [nn.Conv2d(before, channels, kernel_size=3, padding=1), nn.ReLU()]
            before = channels
        layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
    return layers


def _start(module: nn.Module) -> None:
    """He's initialisation: with the paper's own (a standard deviation of 0.01) a network this deep starts at zero."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
