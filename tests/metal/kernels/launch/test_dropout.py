"""Dropout's own kernels: the mask is Philox's, values and gradients are what is kept, scaled."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_mps.metal.kernels.rules import Dispatch
from tests.metal.kernels.launch.philox import stream, uniform


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (5, 64)], ids=str)
def test_dropout_keeps_what_philox_says_and_scales_it(
    kernels: Dispatch, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    given = torch.arange(1, 1 + int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)
    torch.mps.manual_seed(11)
    output, mask = torch.native_dropout(given.to("mps"), 0.25, True)
    count = given.numel()
    kept = uniform(stream(11, 0, -(-count // 4))).ravel()[:count].reshape(shape) < np.float32(0.75)
    np.testing.assert_array_equal(mask.cpu().numpy(), kept)
    wanted = torch.where(torch.from_numpy(kept), given.float() / 0.75, 0.0).to(dtype)
    torch.testing.assert_close(output.cpu(), wanted, rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    assert torch.mps._get_default_mps_generator().get_offset() == count
    assert kernels.ledger.operators["native_dropout"] == 1


def test_its_gradient_is_the_same_elements_scaled(kernels: Dispatch) -> None:
    given = torch.randn(4, 9, device="mps").t().requires_grad_()
    output, mask = torch.native_dropout(given, 0.5, True)
    grad = torch.randn(9, 4, device="mps")
    output.backward(grad)
    torch.testing.assert_close(given.grad.cpu(), torch.where(mask.cpu(), grad.cpu() * 2, 0.0))
    assert kernels.ledger.operators["native_dropout_backward"] == 1


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_nothing_is_drawn_where_nothing_is_dropped(kernels: Dispatch, p: float, train: bool) -> None:
    torch.mps.manual_seed(11)
    given = torch.randn(5, device="mps")
    offset = torch.mps._get_default_mps_generator().get_offset()
    output, mask = torch.native_dropout(given, p, train)
    assert torch.equal(output.cpu(), given.cpu())
    assert bool(mask.all())
    assert torch.mps._get_default_mps_generator().get_offset() == offset


def test_all_is_dropped_at_one(kernels: Dispatch) -> None:
    output, mask = torch.native_dropout(torch.ones(10, device="mps"), 1.0, True)
    assert not output.cpu().any()
    assert not mask.cpu().any()
