"""The gradient of torch.cdist runs Metal's kernel, with the gradient of float64 on the CPU."""

from __future__ import annotations

import math

import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch

TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, math.inf])
@pytest.mark.parametrize("length", [5, 70])
def test_gradients_agree(kernels: Dispatch, p: float, length: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 6, length, generator=draw), torch.randn(1, 140, length, generator=draw)
    first, second = first.to(dtype), second.to(dtype)
    gradient = torch.randn(2, 6, 140, generator=draw).to(dtype)
    exact = first.double().requires_grad_()
    distances = torch.cdist(exact, second.double(), p=p)
    distances.backward(gradient.double())
    assert exact.grad is not None
    call = torch.ops.aten._cdist_backward
    arguments = (
        gradient.to("mps"),
        first.to("mps"),
        second.to("mps"),
        p,
        distances.detach().float().to(dtype).to("mps"),
    )
    found = call(*arguments)
    assert kernels.ledger.operators["_cdist_backward"] == 1
    scale = exact.grad.abs().max()
    torch.testing.assert_close(found.cpu().double() / scale, exact.grad / scale, rtol=0, atol=TOLERANCE[dtype])


def test_euclidean_distances_are_other_operators(kernels: Dispatch) -> None:
    first = torch.randn(4, 3, device="mps", requires_grad=True)
    torch.cdist(first, torch.randn(5, 3, device="mps")).sum().backward()
    assert kernels.ledger.operators["_cdist_backward"] == 0
