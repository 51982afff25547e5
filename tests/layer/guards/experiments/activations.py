"""Activations and batch norm, and their gradients, whose input lies in another order than its dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.layer.guards.experiments.both import agree, numbers


def _gradients(model: nn.Module, rows: torch.Tensor) -> list[torch.Tensor]:
    rows = rows.detach().requires_grad_()
    model.zero_grad()
    found: Any = model(rows)
    (getattr(found, "logits", found) ** 2).sum().backward()
    assert rows.grad is not None
    return [rows.grad, *(each.grad.clone() for each in model.parameters() if each.grad is not None)]


def channels_last_network(folder: Path) -> bool:
    """Batch norm and tanh in channels_last, pytorch#175189's."""
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.BatchNorm2d(3), nn.Tanh(), nn.BatchNorm2d(3)), torch.randn(4, 8, 8, 3)
    return agree(lambda device: _gradients(model.to(device), rows.to(device).permute(0, 3, 1, 2)), laid_out=False)


def permuted_values(folder: Path) -> bool:
    """The activations of pytorch#175188 on heads that were transposed, whose gradients come from a sum."""
    values = numbers(2, 5, 3, 4)

    def run(device: str) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for function in (torch.tanh, torch.sigmoid, F.silu, F.softplus, F.mish, F.relu):
            given = values.to(device).transpose(1, 2).requires_grad_()
            factors = torch.arange(120.0, device=device).view(2, 3, 5, 4)
            found += torch.autograd.grad((function(given) * factors).sum(), given)
        return found

    return agree(run, laid_out=False)


def results_in_another_order(folder: Path) -> bool:
    """What pytorch#131736 names: softplus, threshold and prelu of a transposed tensor and of one in channels_last."""
    values = numbers(2, 5, 3, 4)

    def run(device: str) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for function in (F.softplus, nn.Threshold(0.1, 20.0), nn.PReLU(device=device)):
            for order in ((0, 2, 1, 3), (0, 3, 1, 2)):
                given = values.to(device).permute(order).requires_grad_()
                result = function(given)
                factors = torch.arange(120.0, device=device).view(result.shape)
                found += [result.detach(), *torch.autograd.grad((result * factors).sum(), given)]
        return found

    return agree(run, laid_out=False)


def images_through_a_resnet(folder: Path) -> bool:
    """A small ResNet whose pictures came as they lie in a file, with the channels last."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    # With fewer channels oneDNN corrupts the heap on the CPU (https://github.com/uxlfoundation/oneDNN/issues/6035).
    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    model, pictures = ResNetForImageClassification(config), torch.randn(2, 32, 32, 3)

    def run(device: str) -> list[torch.Tensor]:
        there = model.to(device).to(memory_format=torch.channels_last)
        return _gradients(there, pictures.to(device).permute(0, 3, 1, 2))

    return agree(run, laid_out=False)
