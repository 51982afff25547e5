"""Sampling at a grid's places runs Metal's kernels, and its gradients do, with the result of float64 on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from hf_mps.metal.kernels.rules import Dispatch

# The kernels compute places in float; sums of a gradient in half are rounded at each of some ten additions.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
PADDINGS = ["zeros", "border", "reflection"]


def sampled(given: Tensor, grid: Tensor, **how: object) -> list[Tensor]:
    """The samples, and both gradients of their squares' sum, half."""
    given, grid = given.clone().requires_grad_(), grid.clone().requires_grad_()
    found = functional.grid_sample(given, grid, **how)  # type: ignore[arg-type]
    found.backward(found.detach())
    assert given.grad is not None
    assert grid.grad is not None
    return [found.detach(), given.grad, grid.grad]


def agree(dtype: torch.dtype, shapes: tuple[tuple[int, ...], tuple[int, ...]], **how: object) -> None:
    draw = torch.Generator().manual_seed(0)
    given, grid = torch.randn(shapes[0], generator=draw), torch.rand(shapes[1], generator=draw) * 2.6 - 1.3
    given, grid = given.to(dtype), grid.to(dtype)
    wanted = sampled(given.double(), grid.double(), **how)
    found = sampled(given.to("mps"), grid.to("mps"), **how)
    for ours, right in zip(found, wanted, strict=True):
        scale = max(1.0, right.abs().max().item())
        torch.testing.assert_close(ours.cpu().double() / scale, right / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.rotated
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_images_agree(kernels: Dispatch, mode: str, padding: str, dtype: torch.dtype) -> None:
    for align in (False, True):
        agree(dtype, ((2, 3, 5, 6), (2, 4, 7, 2)), mode=mode, padding_mode=padding, align_corners=align)
    assert kernels.ledger.operators["grid_sampler_2d"] == kernels.ledger.operators["grid_sampler_2d_backward"] == 2


def test_only_the_gradient_that_is_asked_for_is_computed(kernels: Dispatch) -> None:
    given = torch.randn(1, 2, 4, 4, device="mps")
    grid = torch.zeros(1, 2, 2, 2, device="mps", requires_grad=True)
    functional.grid_sample(given, grid, align_corners=False).sum().backward()
    assert [name for name in kernels.ledger.kernels if "backward" in name] == [
        "grid_sampler_2d_backward_bilinear_grid_i32_float"
    ]


def test_images_that_are_transposed_are_read_where_they_lie(kernels: Dispatch) -> None:
    draw = torch.Generator().manual_seed(0)
    given, grid = torch.randn(2, 3, 5, 6, generator=draw), torch.rand(2, 4, 4, 2, generator=draw)
    on = given.to("mps").transpose(2, 3), grid.to("mps").transpose(1, 2)
    wanted = functional.grid_sample(given.transpose(2, 3), grid.transpose(1, 2), align_corners=False)
    torch.testing.assert_close(functional.grid_sample(*on, align_corners=False).cpu(), wanted, rtol=1e-4, atol=1e-5)
    assert kernels.ledger.operators["grid_sampler_2d"] == 1
