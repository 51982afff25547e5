"""The networks that Metal training was announced with, written for transformers: ResNet50, BERT and VGG16.

"Introducing Accelerated PyTorch Training on Mac" (pytorch.org, May 2022): ResNet50 in batches of 128, Hugging Face BERT
in batches of 64 and VGG16 in batches of 64, training and evaluation, as speed-up over the CPU. It names neither lengths
nor optimizers: pictures have the papers' 224 pixels, texts 128 tokens; the two convolutional networks train with
the SGD of their papers, BERT with the AdamW that Trainer takes. Weights and batches are random, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ResNetConfig, ResNetForImageClassification

from hf_mps.core.choice import Choice
from hf_mps.tools.bench.cases import EVALUATION, TRAINING, Case, Work, stepping
from hf_mps.tools.dryrun.modules import ModuleTracker

CLASSES, LABELS = 1000, 2
# VGG's paper, section 3.1; lower than ResNet's rate of 0.1.
SGD: dict[str, Any] = {"lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4}
ADAMW: dict[str, Any] = {"lr": 2e-5, "weight_decay": 0.01, "fused": True}


@dataclass(frozen=True)
class Size:
    """Rows of a batch, and their side in pixels or length in tokens."""

    batch: int
    extent: int


@dataclass(frozen=True)
class Network:
    """`build` makes the network for an extent, `batch` the inputs, and labels where they are given."""

    name: str
    whole: Size
    quick: Size
    build: Callable[[int], nn.Module]
    batch: Callable[[Size, str], dict[str, Any]]
    row: str

    def case(self, quick: bool) -> Case:
        """Yield the network as announced, or `quick` with smaller batches and rows."""
        size = self.quick if quick else self.whole

        @contextmanager
        def make(device: Choice[str]) -> Iterator[Work]:
            yield self._work(size, device.value)

        return Case(self.name, make)

    def _work(self, size: Size, device: str) -> Work:
        torch.manual_seed(0)
        model = self.build(size.extent).to(device)
        batch = self.batch(size, device)
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        kind, settings = (torch.optim.AdamW, ADAMW) if "input_ids" in batch else (torch.optim.SGD, SGD)
        optimizer: Any = kind(model.parameters(), **settings)

        def train() -> None:
            model.train()
            optimizer.zero_grad()
            loss: Any = torch.nn.functional.cross_entropy(_logits(model, inputs), batch["labels"])
            loss.backward()
            optimizer.step()

        def evaluate() -> None:
            model.eval()
            with torch.inference_mode():
                _logits(model, inputs)

        tracker, row = ModuleTracker(), self.row.format(size.extent)
        phases = {TRAINING: stepping(train, tracker), EVALUATION: stepping(evaluate, tracker)}
        facts = {"precision": Choice("fp32", "as announced; every device computes it")}
        return Work(phases, tracker, model, size.batch, row, facts)


def _logits(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Return a transformers model's logits, or what another one returns."""
    answer = model(**inputs) if len(inputs) > 1 else model(*inputs.values())
    return getattr(answer, "logits", answer)


def _pictures(size: Size, device: str) -> dict[str, Any]:
    pictures = torch.randn(size.batch, 3, size.extent, size.extent)
    labels = torch.randint(CLASSES, (size.batch,))
    return {"pixel_values": pictures.to(device), "labels": labels.to(device)}


def _texts(size: Size, device: str) -> dict[str, Any]:
    ids = torch.randint(BertConfig().vocab_size, (size.batch, size.extent))
    mask = torch.ones_like(ids)
    mask[:, size.extent - size.extent // 8 :] = 0  # padding, as batches of texts have it
    labels = torch.randint(LABELS, (size.batch,))
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


GROUPS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
"""Channels of the convolutions, group by group."""
HIDDEN = 4096


class VGG16(nn.Module):
    """Thirteen convolutions and three fully connected layers; 138,357,544 parameters at the paper's 224 pixels.

    From Simonyan and Zisserman, "Very Deep Convolutional Networks", 2014 (https://arxiv.org/abs/1409.1556, table 1 and
    sections 2.1 and 3.1). torchvision has the same network, and cannot be imported beside PyTorch's CPU wheel.

    It takes (N, 3, `side`, `side`) and returns logits (N, 1000). `side` is a multiple of 32, which the five poolings
    divide by; with less than the paper's 224 the first fully connected layer is smaller.
    """

    def __init__(self, side: int = 224) -> None:
        super().__init__()
        features: list[nn.Module] = []
        before = 3
        for group in GROUPS:
            for channels in group:
                features += [nn.Conv2d(before, channels, kernel_size=3, padding=1), nn.ReLU()]
                before = channels
            features.append(nn.MaxPool2d(kernel_size=2, stride=2))
        self.features = nn.Sequential(*features)
        sizes = (GROUPS[-1][-1] * (side // 2 ** len(GROUPS)) ** 2, HIDDEN, HIDDEN)
        layers: list[nn.Module] = []
        for wide, narrow in pairwise(sizes):
            layers += [nn.Linear(wide, narrow), nn.ReLU(), nn.Dropout(0.5)]
        self.classifier = nn.Sequential(nn.Flatten(), *layers, nn.Linear(HIDDEN, CLASSES))
        self.apply(_start)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Logits (N, 1000) of pictures (N, 3, side, side)."""
        logits: torch.Tensor = self.classifier(self.features(pictures))
        return logits


def _start(module: nn.Module) -> None:
    # He's initialisation: with the paper's own (a standard deviation of 0.01) a network this deep starts at zero.
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _resnet50(side: int) -> Any:
    return ResNetForImageClassification(ResNetConfig(num_labels=CLASSES))  # its defaults are ResNet50's


def _bert(length: int) -> Any:
    return BertForSequenceClassification(BertConfig(num_labels=LABELS))  # its defaults are BERT-base's


NETWORKS = (
    Network("ResNet50", Size(128, 224), Size(4, 64), _resnet50, _pictures, "3 x {0} x {0}"),
    Network("BERT", Size(64, 128), Size(4, 32), _bert, _texts, "{0} tokens"),
    Network("VGG16", Size(64, 224), Size(4, 64), VGG16, _pictures, "3 x {0} x {0}"),
)
