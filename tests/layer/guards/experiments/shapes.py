"""Linear layers of shapes whose backward pass ends Python on a Mac."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from hf_mps.metal.device import machine


def survives(call: Callable[[], object]) -> bool:
    """Whether a child of this process lives through `call`, which must not ask autograd, whose threads it has not."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        try:
            call()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def gradients(device: str, rows: tuple[int, ...], weight: tuple[int, ...]) -> list[torch.Tensor]:
    """Those of a linear layer's input and weight, both counted up."""
    given = [torch.arange(float(torch.Size(shape).numel())).view(shape) for shape in (rows, weight)]
    there = [each.to(device).requires_grad_() for each in given]
    F.linear(*there).square().sum().backward()
    return [each.grad.cpu() for each in there if each.grad is not None]


def trains(rows: tuple[int, ...], weight: tuple[int, ...], grad: tuple[int, ...]) -> bool:
    """Whether the gradients of such a layer are computed at all, and are those of the CPU."""
    given = [torch.ones(shape, device="mps") for shape in (rows, grad, weight)]
    if not survives(lambda: torch.ops.aten.linear_backward(*given, [True, True, False])):
        return False
    found, right = gradients("mps", rows, weight), gradients("cpu", rows, weight)
    return all(one.shape == two.shape and torch.allclose(one, two) for one, two in zip(found, right, strict=True))


def weight_of_one_dimension(folder: Path) -> bool:
    """A score for each row, as F.linear(rows, vector) gives it (pytorch#187988)."""
    return trains((6, 3), (3,), (6,)) and trains((2, 3, 4), (4,), (2, 3))


def five_dimensions(folder: Path) -> bool:
    """A layer over patches of one channel and one frame, on macOS 27 (pytorch#187201)."""
    newer = dataclasses.replace(machine.present(), macos="27.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "present", lambda: newer)
        return trains((2, 1, 2, 1, 2), (4, 2), (2, 1, 2, 1, 4))
